"""Collectives through which gradients flow. Each pair is its own transpose: sums of gradients come out right without
any factor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
_OPS = torch.ops._c10d_functional  # what compiled blocks can trace; their Python wrappers differ from 2.11 to 2.13


def gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    """Every rank's x, concatenated along `dim`. Without a gradient."""
    size = dist.get_world_size(group)
    out = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    return out if dim == 0 else torch.cat(out.chunk(size), dim)


def _scattered(x: Tensor, dim: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    rows = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim))
    return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(rows, "sum", size, group.group_name))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grad, ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grad, ctx.dim, ctx.group), None, None


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenate every rank's x along `dim`. Backward: the ranks' gradients are summed, each keeps its own part."""
    return _Gather.apply(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum every rank's x, of which each keeps one part of `dim`. Backward: the parts' gradients are concatenated."""
    return _Scatter.apply(x, dim, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _AllToAll.exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.exchange(grad, ctx.group), None

    @staticmethod
    def exchange(x: Tensor, group: Group) -> Tensor:
        size = dist.get_world_size(group)
        parts = [len(x) // size] * size
        return _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), parts, parts, group.group_name))


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Send the i-th of equal parts of dimension 0 to rank i, and receive as many. Backward: the way back."""
    return _AllToAll.apply(x, group)
