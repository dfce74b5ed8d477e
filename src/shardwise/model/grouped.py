"""The product of each expert with its own rows, in two forms that give the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ALIGNMENT = 16  # bytes, of every stride of a matrix that `grouped_mm` takes


def grouped_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows x (N, in), those of the first group first; weight (G, out, in); counts (G,) rows of each group -> (N, out).

    The counts must sum to N: `grouped_mm` would leave the rows beyond them uninitialised. A group may be empty; the
    gradient of its weight is zero. One kernel in bf16, a product per group in other types, which `grouped_mm` either
    lacks (fp64), or does one by one, too, and not in a compiled block (fp32, fp16).
    """
    aligned = all(size * x.itemsize % _ALIGNMENT == 0 for size in weight.shape[1:])
    return one_kernel(x, weight, counts) if x.dtype == torch.bfloat16 and aligned else one_by_one(x, weight, counts)


def one_kernel(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """All groups in one kernel; the host need not know the counts."""
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))


# Operators, because how the rows are split is known only when they run: compiled blocks and fake tensors see shapes.


@torch.library.custom_op("shardwise::one_by_one", mutates_args=())
def one_by_one(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """A product per group, in any type and of any size. The host waits for the counts."""
    out, sizes = x.new_empty(len(x), weight.shape[1]), counts.tolist()
    for part, rows, matrix in zip(out.split(sizes), x.split(sizes), weight, strict=True):
        torch.mm(rows, matrix.T, out=part)
    return out


@torch.library.custom_op("shardwise::one_by_one_weight", mutates_args=())
def _weight_gradient(gradient: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """(N, out), (N, in), (G,) -> (G, out, in)"""
    out, sizes = x.new_empty(len(counts), gradient.shape[1], x.shape[1]), counts.tolist()
    for matrix, rows, inputs in zip(out, gradient.split(sizes), x.split(sizes), strict=True):
        torch.mm(rows.T, inputs, out=matrix)
    return out


@one_by_one.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_weight_gradient.register_fake
def _(gradient: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], gradient.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, counts = ctx.saved_tensors
    gradient = gradient.contiguous()
    return one_by_one(gradient, weight.transpose(1, 2), counts), _weight_gradient(gradient, x, counts), None


one_by_one.register_autograd(_backward, setup_context=_keep)
