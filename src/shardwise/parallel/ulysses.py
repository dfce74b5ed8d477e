"""Context parallelism by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509).

Before each attention an all-to-all turns a part of the sequence of all heads into whole sequences of a part of the
heads, after it another one turns the result back; the backward does the same. Every rank needs whole KV heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.layers import causal_attention
from shardwise.parallel.collectives import all_to_all
from shardwise.parallel.pieces import by_rank, in_order, split_pieces


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, group: dist.ProcessGroup
) -> Tensor:
    """`Attend` of a part of each sequence: q (B, H, S / cp, d), k, v (B, G, S / cp, …) -> (B, H, S / cp, e)."""
    parts = dist.get_world_size(group)
    outgoing = [_by_heads(x, parts) for x in (q, k, v)]
    received = all_to_all(torch.cat([x.flatten(1) for x in outgoing], dim=1), group)
    flat = received.split([x[0].numel() for x in outgoing], dim=1)
    whole = [in_order(x.view(sent.shape).flatten(0, 1)) for x, sent in zip(flat, outgoing, strict=True)]
    mixed = causal_attention(*whole, scale=scale)  # (B, H / cp, S, e)
    own = all_to_all(by_rank(mixed, parts).unflatten(0, (parts, 2)), group)  # (cp, 2, B, H / cp, S / 2cp, e)
    by_token = own.permute(2, 1, 4, 0, 3, 5).flatten(3, 4).flatten(1, 2)  # (B, S / cp, H, e)
    return by_token.transpose(1, 2)


def _by_heads(x: Tensor, parts: int) -> Tensor:
    """(B, H, S / cp, d) -> by the rank that gets them, (cp, 2, B, H / cp, S / 2cp, d)"""
    return split_pieces(x).unflatten(2, (parts, -1)).movedim(2, 0)
