"""Context parallelism as a ring (arXiv 2310.01889): keys and values travel around while they are attended to.

In each of cp rounds a rank sends the keys and values that it has to the next rank, receives the previous rank's, and
meanwhile computes what its queries make of them; partial results are merged by their log-sum-exp. The backward does
the same, with the gradients of keys and values travelling along. With an early and a late piece on every rank, each
round but the first needs exactly half of all products, and only that is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.attention import attend_block, attend_block_backward

Group = dist.ProcessGroup


def ring_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, group: Group) -> Tensor:
    """`Attend` of a part of each sequence: q (B, H, S / cp, d), k, v (B, G, S / cp, …) -> (B, H, S / cp, e)."""
    return _Ring.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, group: Group) -> Tensor:
        rank, wide = dist.get_rank(group), torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(0), q.new_empty(0)
        for source, block in _visit(_pack(k, v), group):
            rows, columns = seen(rank, source, q.shape[2] // 2)
            keys, values = (x[:, :, columns] for x in _unpack(block, k, v))
            new_out, new_lse = attend_block(q[:, :, rows], keys, values, source == rank, scale)
            if source == rank:
                out, lse = new_out.to(wide, copy=True), new_lse.to(wide, copy=True)
            else:
                merge(out[:, :, rows], lse[:, :, rows], new_out, new_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, wide = dist.get_rank(ctx.group), torch.promote_types(q.dtype, torch.float32)
        by_q, travelling = torch.zeros_like(q, dtype=wide), None
        for source, block in _visit(_pack(k, v), ctx.group):
            rows, columns = seen(rank, source, q.shape[2] // 2)
            keys, values = (x[:, :, columns] for x in _unpack(block, k, v))
            from_rows = (x[:, :, rows] for x in (grad, q, out, lse))
            parts = attend_block_backward(*from_rows, keys, values, source == rank, ctx.scale)
            by_q[:, :, rows] += parts[0]
            # What earlier rounds made of this block's gradient has come along from the previous rank.
            total = block.new_zeros(block.shape, dtype=wide) if travelling is None else travelling.wait()
            for whole, part in zip(_unpack(total, k, v), parts[1:], strict=True):
                whole[:, :, columns] += part
            travelling = _Hop(total, ctx.group)
        assert travelling is not None
        by_k, by_v = _unpack(travelling.wait(), k, v)
        return by_q.to(q.dtype), by_k.to(k.dtype), by_v.to(v.dtype), None, None


def seen(rank: int, source: int, half: int) -> tuple[slice, slice]:
    """Which queries of `rank` see which keys of `source`: all of these see all of those, but within the own part, where
    attention is causal (its positions ascend)."""
    if source == rank:
        return slice(None), slice(None)
    return (slice(None), slice(half)) if source < rank else (slice(half, None), slice(None))


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Add to attention over some keys, in place, that over others: out (B, H, S, e), lse (B, H, S)."""
    total = torch.logaddexp(lse, new_lse)
    out.mul_((lse - total).exp_()[..., None]).add_(new_out * (new_lse - total).exp_()[..., None])
    lse.copy_(total)


def _visit(block: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """(rank, its block) for every rank of the group, the own one first, then the one before it, and so on. Each is
    passed on while the caller works with it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(size):
        hop = _Hop(block, group) if step + 1 < size else None
        yield (rank - step) % size, block
        if hop is not None:
            block = hop.wait()


class _Hop:
    """A contiguous tensor on its way to the next rank, the previous rank's on its way here."""

    def __init__(self, tensor: Tensor, group: Group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._sent, self._received = tensor, torch.empty_like(tensor)  # both must live until the end
        ends = (dist.isend, self._sent, rank + 1), (dist.irecv, self._received, rank - 1)
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(kind, end, dist.get_global_rank(group, peer % size), group) for kind, end, peer in ends]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k.flatten(), v.flatten()))


def _unpack(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a packed tensor in the shapes of k and v."""
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)
