"""The loss where each tensor-parallel rank has the logits of a part of the vocabulary (arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardwise.model.loss import IGNORED, Head


def split_loss(head: Head, group: dist.ProcessGroup) -> None:
    """Make a head with a part of the vocabulary compute the loss over all of it: the same number on every rank."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    def loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return vocabulary_loss(logits, labels, rank * logits.shape[-1], group)

    assert size > 1
    head.loss_and_gradient = loss_and_gradient
    head.loss_sum = lambda x, weight, labels: _Loss.apply(F.linear(x, weight), labels, loss_and_gradient)


def vocabulary_loss(logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Summed loss, and its gradient with respect to these logits, both in promote_types(logits.dtype, float32).

    logits (…, V / tp) of the vocabulary from `first` on, labels (…). Three all-reduces of one number per label.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest = wide.amax(-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    own = labels - first
    here = (own >= 0) & (own < logits.shape[-1])
    index = own.masked_fill(~here, 0)[..., None]
    shifted = wide - highest[..., None]
    chosen = shifted.gather(-1, index)[..., 0].masked_fill(~here, 0)
    share = shifted.exp_()
    sums = torch.stack([share.sum(-1), chosen])
    dist.all_reduce(sums, group=group)
    counted = labels != IGNORED
    loss = ((sums[0].log() - sums[1]) * counted).sum()
    gradient = share.mul_((counted / sums[0])[..., None])
    gradient.scatter_add_(-1, index, -(here & counted).to(gradient.dtype)[..., None])
    return loss, gradient


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, loss_and_gradient: Any) -> Tensor:
        loss, gradient = loss_and_gradient(logits, labels)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad).to(ctx.dtype), None, None
