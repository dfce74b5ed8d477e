"""Output head and loss in pieces, so that the whole logits never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.model.loss import Head

CHUNKS = 8


def compute_in_chunks(head: Head) -> None:
    """Let a head compute its loss in CHUNKS pieces of a micro-batch. Set its `loss_and_gradient` first."""
    head.loss_sum = lambda x, weight, labels: _ChunkedLoss.apply(x, weight, labels, head.loss_and_gradient)


class _ChunkedLoss(torch.autograd.Function):
    """x (B, S, hidden), weight (V, hidden), labels (B, S) -> summed loss. The forward pass computes the gradients, too,
    piece by piece, so logits are computed once; the backward pass only scales them. The weight's gradient is summed in
    at least fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_and_gradient: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rows, targets = x.flatten(0, -2), labels.flatten()
        total = torch.zeros((), dtype=wide, device=x.device)
        by_x = torch.empty_like(rows)
        by_weight = torch.zeros_like(weight, dtype=wide)
        for part, target, out in zip(rows.chunk(CHUNKS), targets.chunk(CHUNKS), by_x.chunk(CHUNKS), strict=True):
            loss, gradient = loss_and_gradient(part @ weight.T, target)
            total += loss
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
                gradient = gradient.to(x.dtype)
                torch.mm(gradient, weight, out=out)
                by_weight += gradient.T @ part
        ctx.save_for_backward(by_x.view_as(x), by_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_x, by_weight = ctx.saved_tensors
        return by_x * grad.to(by_x.dtype), (by_weight * grad).to(ctx.dtype), None, None
