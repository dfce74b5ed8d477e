"""Gradient norm over all ranks, and clipping."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def gradient_norm(module: nn.Module) -> Tensor:
    """The 2-norm of the whole gradient, the same scalar on every rank, however it is sharded."""
    norm = get_total_norm([p.grad for p in module.parameters() if p.grad is not None], foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def clip_gradients(module: nn.Module, norm: Tensor, largest: float) -> None:
    """Scale the gradient so that its norm, which is `norm` now, does not exceed `largest` (0: leave it)."""
    if largest > 0:
        clip_grads_with_norm_(module.parameters(), largest, norm, foreach=True)


@torch.no_grad()
def scale_gradients(module: nn.Module, factor: float) -> None:
    """Multiply every gradient that this rank holds."""
    torch._foreach_mul_([_local(p.grad) for p in module.parameters() if p.grad is not None], factor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
