"""ZeRO-1 (arXiv 1910.02054, stage 1): every rank has the whole weights and gradients, and its part of the optimizer's
state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.parallel.buckets import in_buckets
from shardwise.parallel.compat import all_gather
from shardwise.parallel.gradients import local
from shardwise.parallel.module import ParallelModule
from shardwise.parallel.place import is_expert

BUCKET = 64 * 2**20  # elements of whole parameters that are gathered together, unless one has more


class ShardedOptimizer:
    """Around an optimizer that `build` makes of this rank's parts of a module's parameters: updates those, then gathers
    the parameters. Its parts are DTensors of the whole parameters' shapes, and so is its state."""

    def __init__(self, module: ParallelModule, build: Callable[[list[tuple[str, nn.Parameter]]], Any]):
        mesh = module.mesh
        self._parts = []
        named = []
        for name, parameter in module.named_parameters():
            holders = mesh.experts if is_expert(parameter) else mesh.weights
            assert holders is not None
            part = _part(parameter, holders)
            self._parts.append(part)
            named.append((name, part.own))
        self._optimizer = build(named)
        self.state, self.param_groups = self._optimizer.state, self._optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for part in self._parts:
            part.take()
        self._optimizer.step()
        for part in self._parts:
            part.own.grad = None
        for bucket in _buckets(self._parts):
            _gather(bucket)


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter along `dim`, the first dimension that nothing else cuts; where there is none,
    every rank updates all of it. `own` is a view of the parameter where it can be, else a copy."""

    whole: nn.Parameter
    own: nn.Parameter
    dim: int | None
    group: dist.ProcessGroup
    view: bool

    def of(self, tensor: Tensor, rank: int) -> Tensor:
        """A rank's part of this rank's whole tensor. Torch cuts so: all parts but the last ones have the same size."""
        if self.dim is None:
            return tensor
        length = tensor.shape[self.dim]
        start = min(rank * self.rows, length)
        return tensor.narrow(self.dim, start, min(self.rows, length - start))

    @property
    def rows(self) -> int:
        """Of the first rank's part."""
        assert self.dim is not None
        return -(-self.whole.shape[self.dim] // dist.get_world_size(self.group))

    def take(self) -> None:
        """The parameter and its gradient, as they are now."""
        rank = dist.get_rank(self.group)
        if not self.view:
            self.own.to_local().copy_(self.of(local(self.whole), rank))
        if self.whole.grad is not None:
            gradient = self.of(local(self.whole.grad), rank).contiguous()
            self.own.grad = DTensor.from_local(
                gradient,
                self.own.device_mesh,
                self.own.placements,
                run_check=False,
                shape=self.whole.shape,
                stride=self.own.stride(),
            )


@torch.no_grad()
def _part(parameter: nn.Parameter, holders: DeviceMesh) -> Part:
    """holders: the mesh whose `replicate` dimension are the ranks that hold the same."""
    spread = parameter if isinstance(parameter, DTensor) else None
    placements = spread.placements if spread is not None else ()
    names = spread.device_mesh.mesh_dim_names or () if spread is not None else ()
    cut = {place.dim for place in placements if isinstance(place, Shard)}
    dim = next((dim for dim in range(parameter.ndim) if dim not in cut), None)
    replicas = holders["replicate"]
    part = Part(parameter, parameter, dim, replicas.get_group(), True)
    piece = part.of(local(parameter), replicas.get_local_rank())
    own = DTensor.from_local(
        piece.contiguous(),
        holders[("replicate", *names)] if names else replicas,
        [Replicate() if dim is None else Shard(dim), *placements],
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, device="meta").stride(),
    )
    return replace(part, own=nn.Parameter(own), view=piece.is_contiguous())


def _buckets(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts that can be gathered together."""
    alike: dict[Any, list[Part]] = {}
    for part in parts:
        if part.dim is not None:
            alike.setdefault((part.group, part.whole.dtype), []).append(part)
    for those in alike.values():
        yield from in_buckets(those, lambda part: local(part.whole).numel(), BUCKET)


def _gather(bucket: list[Part]) -> None:
    """Every rank's parts of these parameters to all ranks: one all-gather of equal sizes."""
    group = bucket[0].group
    ranks = dist.get_world_size(group)
    wholes = [local(part.whole) for part in bucket]
    sizes = [part.rows * (whole.numel() // whole.shape[part.dim]) for part, whole in zip(bucket, wholes, strict=True)]
    send = wholes[0].new_empty(sum(sizes))
    owns = [part.own.to_local().flatten() for part in bucket]
    torch._foreach_copy_([room[: len(own)] for room, own in zip(send.split(sizes), owns, strict=True)], owns)
    received = send.new_empty(ranks * len(send))
    all_gather(received, send, group)
    places, values = [], []
    for rank, row in enumerate(received.chunk(ranks)):
        for part, whole, room in zip(bucket, wholes, row.split(sizes), strict=True):
            place = part.of(whole, rank)
            places.append(place)
            values.append(room[: place.numel()].view(place.shape))
    torch._foreach_copy_(places, values)
