"""What is left to do with gradients after the backward: sums that no wrapper made, the norm, clipping.

Nothing is divided here. Each gradient is the *sum* over all tokens of the batch, whoever computed a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwise.parallel.buckets import in_buckets

_BUCKET = 64 * 2**20  # elements that are reduced together


@torch.no_grad()
def sum_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of weights that every tensor-parallel rank holds and of which each saw a part of the tokens.
    FSDP2 does it by itself."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(isinstance(place, Partial) for place in grad.placements):
            parameter.grad = grad.redistribute(placements=parameter.placements)


@torch.no_grad()
def all_reduce_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Sum gradients over replicas, in buckets, in `dtype`. A parameter without a gradient counts as zero."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault(parameter.dtype, []).append(local(_gradient(parameter)))
    for gradients in alike.values():
        for bucket in in_buckets(gradients, Tensor.numel, _BUCKET):
            flat = torch.cat([tensor.flatten() for tensor in bucket]).to(dtype)
            dist.all_reduce(flat, group=group)
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])


@torch.no_grad()
def add_other_copy(parameter: nn.Parameter, group: dist.ProcessGroup, other: int) -> None:
    """Sum the gradient of a weight of which one other rank of the group holds a copy: both get the same numbers."""
    own = local(_gradient(parameter)).contiguous()
    received = torch.empty_like(own)
    if dist.get_rank(group) < other:  # in opposite orders, so that neither waits for the other
        works = dist.isend(own, group=group, group_dst=other), dist.irecv(received, group=group, group_src=other)
    else:
        works = dist.irecv(received, group=group, group_src=other), dist.isend(own, group=group, group_dst=other)
    for work in works:
        work.wait()
    local(_gradient(parameter)).add_(received)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def copies(gradient: Tensor, ranks: int) -> int:
    """How many of `ranks` ranks hold the same part of a gradient."""
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        for dimension, place in enumerate(gradient.placements):
            if not isinstance(place, Replicate):
                ranks //= mesh.size(dimension)
    return ranks


@torch.no_grad()
def norm_of(gradients: list[tuple[Tensor, int]], device: torch.device) -> Tensor:
    """The 2-norm over all ranks of gradients that come with the number of their copies: the same fp64 scalar on every
    rank, however they are sharded. Called on every rank."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        tensors = [local(gradient) for gradient, _ in gradients]
        # A CPU adds up so many fp32 numbers to three digits only.
        wide = torch.float64 if tensors[0].device.type == "cpu" else None
        norms = torch.stack(torch._foreach_norm(tensors, dtype=wide)).to(total)
        counts = torch.tensor([count for _, count in gradients], dtype=torch.float64, device=device)
        total = (norms.square() / counts).sum()
    dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def scale(gradients: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply what this rank holds of each."""
    if tensors := [local(gradient) for gradient in gradients]:
        torch._foreach_mul_(tensors, factor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
