"""Collectives through which gradients flow. Each pair is its own transpose: sums of gradients come out right without
any factor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

Group = dist.ProcessGroup


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _wait(all_gather_tensor(x.contiguous(), dim, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _wait(reduce_scatter_tensor(grad.contiguous(), "sum", ctx.dim, ctx.group)), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _wait(reduce_scatter_tensor(x.contiguous(), "sum", dim, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _wait(all_gather_tensor(grad.contiguous(), ctx.dim, ctx.group)), None, None


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenate every rank's x along `dim`. Backward: the ranks' gradients are summed, each keeps its own part."""
    return _Gather.apply(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum every rank's x, of which each keeps one part of `dim`. Backward: the parts' gradients are concatenated."""
    return _Scatter.apply(x, dim, group)


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x.elem if hasattr(x, "elem") else x)
