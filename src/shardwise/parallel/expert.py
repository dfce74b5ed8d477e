"""Expert parallelism: the routed experts of a layer are spread over ep ranks (arXiv 2006.16668), dropless.

What it shards: experts, over ep of the ranks that dp_shard · cp · tp make; those that hold the same experts shard them
further (FSDP2) or replicate them. What it communicates: in each layer how many token copies go where, then the copies,
to the ranks of their experts and back (all-to-all with uneven splits), the same in the backward; the copies travel
while the shared experts compute. An expert sees the tokens of all ep ranks, so its gradient needs no sum over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import Shard

from shardwise.model.decoder import Decoder
from shardwise.model.experts import MoE
from shardwise.model.router import Router
from shardwise.parallel.collectives import gathered
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pieces import own_positions
from shardwise.parallel.place import place


def spread_experts(decoder: Decoder, mesh: Mesh) -> None:
    """Give each rank its experts, in place (on the meta device)."""
    assert mesh.experts is not None
    ep = mesh.experts["ep"]
    for block in decoder.blocks.values():
        if isinstance(block.mlp, MoE):
            place(block.mlp.experts, ep, gate=Shard(0), up=Shard(0), down=Shard(0))
            block.mlp.exchange = AllToAll(ep.get_group())


@dataclass(frozen=True)
class Route:
    """How the copies went, to send them back the same way."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    order: Tensor  # of the received rows, sorted by expert
    counts: Tensor  # received rows of each own expert


class AllToAll:
    """The exchange of token copies with the other ranks of a group (`Stay` in model/experts.py is that of one rank)."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self._ranks = group, dist.get_world_size(group)

    def send(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Route]:
        """Rows sorted by expert, and how many there are of each (count,): under way to the ranks that hold them."""
        theirs = counts.view(self._ranks, -1)  # (ep, experts of one rank)
        mine = theirs.clone()  # from each rank, for each own expert; in a fake process group it stays as it is
        dist.all_to_all_single(mine, theirs.contiguous(), group=self._group)
        sent, received = torch.stack([theirs.sum(1), mine.sum(1)]).tolist()
        experts = torch.arange(mine.shape[1], device=rows.device).repeat(self._ranks)
        order = experts.repeat_interleave(mine.flatten(), output_size=sum(received)).argsort(stable=True)
        route = Route(sent, received, order, mine.sum(0))
        return all_to_all_single_autograd(rows, received, sent, self._group), route

    def arrived(self, rows: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        """What came, sorted by own expert, and how many there are of each."""
        return rows[route.order], route.counts

    def back(self, rows: Tensor, route: Route) -> Tensor:
        """The results, sorted by own expert, back to where the copies came from, in their old order."""
        unsorted = torch.empty_like(rows).index_copy(0, route.order, rows)
        return all_to_all_single_autograd(unsorted, route.sent, route.received, self._group)


def balance_whole_sequences(decoder: Decoder, mesh: Mesh, length: int, device: torch.device) -> None:
    """Let routers balance and drop by whole sequences where these are spread over cp and tp ranks."""
    group, layout = mesh.sequence, mesh.layout
    routers = [module for module in decoder.modules() if isinstance(module, Router)]
    if group is None or not routers:
        return
    parts = layout.cp * layout.tp
    positions = torch.cat([own_positions(length, layout.cp, rank) for rank in range(layout.cp)])  # as they are gathered
    natural, own = positions.argsort().to(device), positions.chunk(parts)[dist.get_rank(group)].to(device)

    def sum_over_sequence(counts: Tensor) -> Tensor:
        counts = counts.clone()
        dist.all_reduce(counts, group=group)
        return counts

    def whole_sequence(indices: Tensor) -> Tensor:
        return gathered(indices, 1, group)[:, natural]

    for router in routers:
        router.sequence_parts = parts
        router.sum_over_sequence = sum_over_sequence
        router.whole_sequence = whole_sequence
        router.own_part = lambda keep: keep[:, own]
