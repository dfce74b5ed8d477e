"""The output head, and the next-token loss as a sum, never a mean: means of means depend on how the batch was cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.model.layers import cast
from shardwise.spec import Model

IGNORED = -100  # label of a position that has no target


class Head(nn.Module):
    """Hidden states (B, S, hidden) to logits, or to the summed loss of given labels. A tied head has no parameter of
    its own (one registered twice would come apart in `to_empty`): it is given the embedding's at each call.

    `loss_sum(x, weight, labels)` is how the loss is computed, at once or in pieces (`model/chunked_loss.py`), the
    latter with `loss_and_gradient(logits, labels)`.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.weight = None if model.tied else nn.Parameter(torch.empty(model.vocabulary, model.hidden))
        self.loss_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = full_loss
        self.loss_and_gradient: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = loss_and_gradient

    def forward(self, x: Tensor, labels: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        weight = cast(self.weight if tied is None else tied, x)
        return F.linear(x, weight) if labels is None else self.loss_sum(x, weight, labels)


def full_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Loss over all logits at once: x (B, S, hidden), weight (V, hidden), labels (B, S) -> scalar."""
    return cross_entropy_sum(F.linear(x, weight), labels)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label) in nats over all positions whose label is not IGNORED.

    logits (B, S, V), labels (B, S) -> scalar, in promote_types(logits.dtype, float32).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of logits (…, V), as `cross_entropy_sum`, and its gradient with respect to them, as wide as it."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted, index = labels != IGNORED, labels.clamp(min=0)[..., None]
    logs = wide.log_softmax(-1)
    loss = -(logs.gather(-1, index)[..., 0] * counted).sum()
    gradient = logs.exp_().scatter_add_(-1, index, -torch.ones_like(index, dtype=logs.dtype))
    return loss, gradient.mul_(counted[..., None])
