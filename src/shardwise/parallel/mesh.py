"""The mesh: which rank stands where, and with whom it talks.

Ranks are numbered with tensor parallelism innermost: (pp, dp_replicate, dp_shard, cp, tp). Weights live on a mesh of
their own, (pp, replicate, shard, tp), where `shard` are all ranks that share one copy, those of cp included; routed
experts on (pp, replicate, shard, ep).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.spec import Layout

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """`weights` and `experts` (None without expert parallelism) as above; `context` joins the ranks of cp, `sequence`
    those of cp and tp, among which every sequence is spread (each None where it is one rank)."""

    layout: Layout
    rank: int
    weights: DeviceMesh
    experts: DeviceMesh | None
    context: dist.ProcessGroup | None
    sequence: dist.ProcessGroup | None

    @property
    def data_rank(self) -> int:
        """Which share of every batch this rank reads, 0 … data_ranks - 1."""
        return self.coordinate("dp_replicate") * self.layout.dp_shard + self.coordinate("dp_shard")

    @property
    def counts_targets(self) -> bool:
        """Whether this is the first of the ranks that read the same data."""
        return all(self.coordinate(name) == 0 for name in ("pp", "cp", "tp"))

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold the same pipeline stages."""
        return self.layout.world // self.layout.pp

    def coordinate(self, dimension: str) -> int:
        """This rank's place in one of DIMENSIONS, from 0."""
        stride = 1
        for name in reversed(DIMENSIONS):
            if name == dimension:
                return self.rank // stride % getattr(self.layout, name)
            stride *= getattr(self.layout, name)
        raise KeyError(dimension)

    def describe(self) -> str:
        """This rank's place, for messages: 'dp_replicate 0, dp_shard 1'."""
        parts = [f"{name} {self.coordinate(name)}" for name in DIMENSIONS if getattr(self.layout, name) > 1]
        return ", ".join(parts) or "the only rank"


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of the default process group; its world size must equal layout.world."""
    data = layout.dp_shard * layout.cp
    # Where nothing is sharded, all data ranks are replicas.
    replicate, shard = (layout.dp_replicate, data) if layout.zero >= 2 else (layout.dp_replicate * data, 1)
    experts = None
    if layout.ep > 1:
        copies = data * layout.tp // layout.ep
        replicas, shards = (layout.dp_replicate, copies) if layout.zero >= 2 else (layout.dp_replicate * copies, 1)
        experts = _mesh(device_type, pp=layout.pp, replicate=replicas, shard=shards, ep=layout.ep)
    return Mesh(
        layout=layout,
        rank=dist.get_rank(),
        weights=_mesh(device_type, pp=layout.pp, replicate=replicate, shard=shard, tp=layout.tp),
        experts=experts,
        context=_across(device_type, layout.world, stride=layout.tp, size=layout.cp),
        sequence=_across(device_type, layout.world, stride=1, size=layout.cp * layout.tp),
    )


# A process group is never given back: DTensor remembers meshes by their shape, and would reach for its name. So meshes
# of the same shape are the same one.
@functools.cache
def _mesh(device_type: str, **sizes: int) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@functools.cache
def _across(device_type: str, world: int, *, stride: int, size: int) -> dist.ProcessGroup | None:
    """Groups of `size` ranks that lie `stride` apart; None for groups of one."""
    if size == 1:
        return None
    ranks = torch.arange(world).view(-1, size, stride).transpose(1, 2).reshape(-1, size)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("rest", "group")).get_group("group")


_EXCHANGES = {
    "pp": "activations and their gradients, from stage to stage",
    "dp_replicate": "gradients, once a step: all-reduce",
    "dp_shard": "weights: all-gather; gradients: reduce-scatter",
    "cp": "keys and values of every attention",
    "tp": "activations around every attention and MLP: all-gather, reduce-scatter",
}


def mesh_table(layout: Layout) -> str:
    """Who stands where and exchanges what, in plain lines, for the start of a run: the dimensions of more than one
    rank, outermost first, with the ranks of the first group of each."""
    lines, stride = [], 1
    for name in reversed(DIMENSIONS):
        size = getattr(layout, name)
        if size > 1:
            ranks = [str(rank * stride) for rank in range(size)]
            shown = ", ".join(ranks if size <= 4 else [*ranks[:3], "…", ranks[-1]])
            lines.append(f"  {name:<12}  {size:>4}  {shown:<24}  {_EXCHANGES[name]}")
        stride *= size
    if layout.ep > 1:
        shown = f"of {layout.dp_shard * layout.cp * layout.tp}"
        lines.insert(
            0, f"  {'ep':<12}  {layout.ep:>4}  {shown:<24}  token copies to their experts and back: all-to-all"
        )
    head = f"  {'mesh':<12}  size  {'first group':<24}  exchanges"
    return "\n".join([head, *reversed(lines)]) if lines else "  mesh: one rank"
