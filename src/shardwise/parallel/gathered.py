"""Context parallelism by all-gathering keys and values (as in Llama 3, arXiv 2407.21783, section 3.3.2).

One all-gather of keys and values before each attention, one reduce-scatter of their gradients in its backward; both are
exposed, but small where queries share few KV heads. The gathered keys and values are kept for the backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.attention import attend_suffix
from shardwise.parallel.collectives import gather
from shardwise.parallel.pieces import in_order, split_pieces


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, group: dist.ProcessGroup
) -> Tensor:
    """`Attend` of a part of each sequence: q (B, H, S / cp, d), k, v (B, G, S / cp, …) -> (B, H, S / cp, e)."""
    pieces = gather(torch.cat((split_pieces(k), split_pieces(v)), dim=-1), 0, group)
    keys, values = in_order(pieces).split([k.shape[-1], v.shape[-1]], dim=-1)
    return attend_pieces(q, keys, values, scale, dist.get_rank(group))


def attend_pieces(q: Tensor, keys: Tensor, values: Tensor, scale: float | None, rank: int) -> Tensor:
    """A rank's queries (B, H, S / cp, d) with keys and values of whole sequences (B, G, S, …) -> (B, H, S / cp, e).
    Each of the two pieces sees the positions up to its own end."""
    early, late = q.chunk(2, dim=2)
    ends = (rank + 1) * early.shape[2], keys.shape[2] - rank * late.shape[2]
    parts = [
        attend_suffix(piece, keys[:, :, :end], values[:, :, :end], scale).transpose(1, 2)
        for piece, end in zip((early, late), ends, strict=True)
    ]
    return torch.cat(parts, dim=1).transpose(1, 2)  # in the order in which the output projection wants it
