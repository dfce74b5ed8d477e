"""How context parallelism cuts a sequence: into 2 · cp pieces, of which every rank has an early and a late one, so that
causal attention is the same work for all."""

from __future__ import annotations

import torch
from torch import Tensor


def own_positions(length: int, parts: int, rank: int) -> Tensor:
    """Which positions of a sequence a rank has: of 2 · parts pieces the rank-th from the start and from the end.
    (length / parts,) int64, ascending."""
    pieces = torch.arange(length).chunk(2 * parts)
    return torch.cat([pieces[rank], pieces[2 * parts - 1 - rank]])


def split_pieces(x: Tensor) -> Tensor:
    """A rank's part (…, S / cp, d) -> its two pieces first, (2, …, S / 2cp, d)."""
    return x.unflatten(-2, (2, -1)).movedim(-3, 0)


def in_order(pieces: Tensor) -> Tensor:
    """All ranks' pieces by rank, (2cp, …, S / 2cp, d) -> whole sequences in natural order, (…, S, d)."""
    last = len(pieces) - 1
    ranks = range(len(pieces) // 2)
    return torch.cat([pieces[2 * rank] for rank in ranks] + [pieces[last - 2 * rank] for rank in ranks], dim=-2)


def by_rank(x: Tensor, parts: int) -> Tensor:
    """The inverse of `in_order`: (…, S, d) -> (2 · parts, …, S / (2 · parts), d)."""
    pieces, last = x.chunk(2 * parts, dim=-2), 2 * parts - 1
    return torch.stack([pieces[index] for rank in range(parts) for index in (rank, last - rank)])
