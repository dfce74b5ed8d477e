"""The weights of one rank: how many before and after sharding over data ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardwise.spec import Layout, Model


@dataclass(frozen=True)
class Weights:
    """Elements of one unit (a block, or a table) on one rank: `whole` as computed with, `shard` as the optimizer holds
    it where data ranks share it, `padded` as it is gathered from equal shards."""

    whole: float = 0.0
    shard: float = 0.0
    padded: float = 0.0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.whole + other.whole, self.shard + other.shard, self.padded + other.padded)

    def __mul__(self, count: float) -> Weights:
        return Weights(self.whole * count, self.shard * count, self.padded * count)


def _shared(whole: float, shard: float, ranks: float) -> Weights:
    return Weights(whole, shard, shard * ranks)


def sharding(layout: Layout) -> int:
    """Ranks that share one copy of parameters and optimizer state: with zero 1 all data ranks, with zero 0 none."""
    if layout.zero == 0:
        return 0
    return layout.dp_shard * layout.cp * (layout.dp_replicate if layout.zero == 1 else 1)


def _matrix(rows: float, columns: float, ranks: int, *, even: bool) -> Weights:
    """FSDP2 cuts rows and pads the last ranks; flat buffers are cut evenly."""
    ranks = max(1, ranks)
    return _shared(rows * columns, rows * columns / ranks if even else -(-rows // ranks) * columns, ranks)


@functools.lru_cache(maxsize=65536)
def block_weights(model: Model, tp: int, ep: int, ranks: int, *, moe: bool, even: bool = False) -> Weights:
    """One block, shared by `ranks` (0: by none). Tensor parallelism divides projections, expert parallelism the routed
    experts."""
    hidden = model.hidden
    ups = 2 if model.activation == "swiglu" else 1

    def matrix(rows: float, columns: float) -> Weights:
        return _matrix(rows, columns, ranks, even=even)

    total = matrix(hidden, 1) * (2 * (2 if model.norm_bias else 1))
    if latent := model.latent:
        query = model.heads * (latent.nope_dim + latent.rope_dim) / tp
        total += matrix(latent.query_rank, hidden) + matrix(query, latent.query_rank or hidden)
        total += matrix(latent.kv_rank + latent.rope_dim, hidden)
        total += matrix(model.heads * (latent.nope_dim + latent.value_dim) / tp, latent.kv_rank)
        total += matrix(hidden, model.heads * latent.value_dim / tp)
        total += matrix(latent.query_rank + latent.kv_rank, 1)
    else:
        # Ranks that share a KV head hold all rows, and compute some of them.
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim / (tp if model.kv_heads % tp == 0 else 1)
        total += matrix(rows, hidden) + matrix(hidden, model.heads * model.head_dim / tp)
        total += matrix(rows, model.qkv_bias) + matrix(hidden, model.out_bias)
        total += matrix(model.head_dim, 1) * (2 * model.qk_norm)
    experts = model.experts if moe else None
    ffn = (experts.shared_ffn if experts else model.ffn) / tp
    total += matrix(ffn, hidden) * ups + matrix(hidden, ffn)
    if model.mlp_bias and not experts:
        total += matrix(ffn, 1) * ups + matrix(hidden, 1)
    if experts:
        total += matrix(experts.count, hidden) + matrix(experts.shared_gate, hidden)
        total += routed_weights(model, tp, ep, ranks, even=even)
    return total


def routed_weights(model: Model, tp: int, ep: int, ranks: int, *, even: bool = False) -> Weights:
    """The routed experts of one block. With ep > 1 those that hold the same ones share them: ranks · tp / ep, where
    anything is shared at all."""
    experts = model.experts
    assert experts is not None
    matrices = 3 if model.activation == "swiglu" else 2
    one = experts.ffn * model.hidden * matrices / (1 if ep > 1 else tp)
    count = experts.count / ep
    shares = max(1.0, ranks * tp / ep if ep > 1 else ranks)
    evenly = even or cut_within(model, ep, shares)
    return _shared(count * one, count * one / shares if evenly else -(-count // shares) * one, shares)


def cut_within(model: Model, ep: int, shares: float) -> bool:
    """Whether ranks that share experts cut each one, not the list of them (`parallel/data.py`)."""
    experts = model.experts
    return bool(experts and ep > 1 and experts.count / ep < shares and experts.ffn % shares == 0)


def table_weights(model: Model, tp: int, ranks: int, *, even: bool = False) -> Weights:
    """The embedding, or an untied head: vocabulary × hidden."""
    return _matrix(model.vocabulary / tp, model.hidden, ranks, even=even)


def position_weights(model: Model, ranks: int, *, even: bool = False) -> Weights:
    if model.positions != "learned":
        return Weights()
    return _matrix(model.max_sequence, model.hidden, ranks, even=even)
