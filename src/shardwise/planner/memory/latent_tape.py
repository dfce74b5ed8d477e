"""Latent attention (`model/latent.py`) in the tape of a block's backward, without context parallelism."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardwise.planner.memory.block_tape import Block, BlockTape
from shardwise.planner.memory.saved_tape import Gradient
from shardwise.spec import Model


@dataclass(frozen=True)
class Latent:
    """Bytes of a micro-batch's tensors, elements of each product's weight. Tensor-parallel ranks compute the latents of
    their own tokens and gather them; heads are split over them."""

    queries: float  # the latent; 0 where there is none
    keys: float  # with the key's part that is rotated, which all heads share
    narrow_keys: float  # without it
    own: float  # the share of tokens whose latents this rank computes
    turned: float  # the part of queries that is rotated
    values: float
    products: float  # keys that are not rotated, and values
    statistics: float  # of a latent's norm
    query_down: float
    query_up: float
    key_down: float
    key_up: float


class LatentAttention(BlockTape):
    """What differs from `BlockTape`."""

    @property
    def latent(self) -> Latent:
        assert isinstance(self.b, LatentBlock) and self.b.latent is not None
        return self.b.latent

    def _saved(self) -> list[tuple[str, float, bool]]:
        latent, b = self.latent, self.b
        others = super()._saved()
        names = [name for name, *_ in others]
        before, after = names.index("attention_norm") + 1, names.index("mlp_norm")
        kept = latent.own == 1
        mine = [
            ("latents' input", b.stream, False),
            ("query input", b.whole * (b.parallel and not latent.queries), False),
            ("query latent", latent.queries, kept),
            ("query latent norm", latent.queries + latent.statistics * (latent.queries > 0), False),
            ("key latent", latent.keys, kept),
            ("key latent norm", latent.narrow_keys + latent.statistics, False),
            ("key product", latent.products, True),
            ("turned query", b.query, False),
            ("turned key", b.query, False),
            ("attention", latent.values, True),
            ("logsumexp", b.sums, True),
        ]
        return [*others[:before], *mine, *others[after:]]

    def _keep_attention(self) -> None:
        """Nothing that is not in `_kept_products`."""

    def _kept_products(self) -> list[tuple[str, float, float]]:
        latent = self.latent
        found = [*super()._kept_products(), ("query", self.b.query, 0.0)]
        if latent.own < 1:
            found += [("latents", (latent.queries + latent.keys) * latent.own, 0.0)]
        return found

    def _weights(self) -> list[tuple[str, float]]:
        return [*self._projections(), *(item for item in super()._weights() if item[0] != "qkv")]

    def _projections(self) -> list[tuple[str, float]]:
        latent = self.latent
        down = [("query down", latent.query_down)] if latent.queries else []
        return [*down, ("query up", latent.query_up), ("key down", latent.key_down), ("key up", latent.key_up)]

    def _attention_again(self) -> None:
        b, latent = self.b, self.latent
        self._save("latents' input")
        for name, elements in self._projections():
            self._cast(name, elements)
        if latent.queries:
            self._save("query latent")
            self._save("query latent norm")
        elif b.parallel:
            self._gather("query input")
        if self.policy != "selective":
            self.make("product of query", b.query)
        self._save("key latent")
        self._save("key latent norm")
        self._save("key product")
        wide = latent.turned * 4 / b.width
        self.make("wide", wide * (b.width < 4))
        self.make("turned", 2 * wide)
        self._save("turned query")
        self.drop("turned", "wide")
        if self.policy != "selective":
            self.drop("product of query")
        self._save("turned key")
        self._save("attention")
        self._save("logsumexp")
        self._cast("out", b.out)
        self._product("out")
        self._save("attention.out")
        self.drop("product of out", "scattered out")

    def _attention_backward(self) -> None:
        b, latent = self.b, self.latent
        self._whole_gradient()
        self.fetch("attention", "turned query", "turned key", "key product")
        self._product_backward("out", b.out, "by attention", latent.values, done=["whole gradient"])
        for name, size in (("by query", b.query), ("by key", b.query), ("by value", latent.values)):
            self.make(name, size)
        self.drop("by attention", "attention", "logsumexp", "turned query", "turned key")
        self._turn_back("turned", latent.turned)
        self.make("by query product", b.query)
        self.drop("by query", "turned")
        self.make("by key product", latent.products)
        self.drop("by key", "by value", "key product")
        self.fetch(
            "key latent norm", "key latent", "query latent norm", "query latent", "latents' input", "query input"
        )
        self._product_backward(
            "key up", latent.key_up, "by key latent", latent.narrow_keys, done=["by key product", "key latent norm"]
        )
        self.make("by keys", latent.keys)
        self._done("by key latent", "key latent")
        self._product_backward("key down", latent.key_down, "input by keys", b.stream, done=["by keys"])
        self._weight("query up", latent.query_up)
        if not latent.queries:
            self.make("input by queries", b.whole if b.parallel else b.stream)
            self._done("by query product", "query input")
            self._weight_done("query up", latent.query_up)
            self._scatter("input by queries")
        else:
            self.make("by query latent", latent.queries)
            self._done("by query product", "query latent norm")
            self._weight_done("query up", latent.query_up)
            self.make("by queries", latent.queries)
            self._done("by query latent", "query latent")
            self._product_backward("query down", latent.query_down, "input by queries", b.stream, done=["by queries"])
        self.make("by input", b.stream)
        self._done("input by keys", "input by queries", "latents' input")
        self.drop("input by keys", "input by queries")


@dataclass(frozen=True)
class LatentBlock(Block):
    """Perhaps with latent attention."""

    latent: Latent | None = None

    def tape(self, policy: str, gradient: Gradient, offloaded: bool) -> BlockTape:
        tape = LatentAttention if self.latent else BlockTape
        return tape(self, policy, gradient, offloaded)

    @property
    def attention(self) -> float:
        """Elements of its products' weights."""
        if latent := self.latent:
            return latent.query_down + latent.query_up + latent.key_down + latent.key_up + self.out
        return self.qkv + self.out

    @property
    def weights(self) -> float:
        return super().weights - self.qkv - self.out + self.attention

    @property
    def largest(self) -> float:
        largest = super().largest
        if latent := self.latent:
            return max(largest, latent.query_down, latent.query_up, latent.key_down, latent.key_up)
        return largest

    @property
    def rows_cut(self) -> float:
        if latent := self.latent:
            return super().rows_cut - self.qkv + latent.query_up + latent.key_up
        return super().rows_cut


def latent_block(block: Block, model: Model, tp: int, tokens: float) -> LatentBlock:
    """block: as `block_of` makes it of the same model. tokens: of a micro-batch."""
    own = {field.name: getattr(block, field.name) for field in fields(block)}
    spec = model.latent
    if spec is None:
        return LatentBlock(**own)
    width, heads, hidden = block.width, model.heads / tp, model.hidden
    head = spec.nope_dim + spec.rope_dim
    narrow = width * tokens
    latent = Latent(
        queries=narrow * spec.query_rank,
        keys=narrow * (spec.kv_rank + spec.rope_dim),
        narrow_keys=narrow * spec.kv_rank,
        own=1 / tp,
        turned=narrow * heads * spec.rope_dim,
        values=narrow * heads * spec.value_dim,
        products=narrow * heads * (spec.nope_dim + spec.value_dim),
        statistics=4 * tokens,
        query_down=float(spec.query_rank * hidden),
        query_up=heads * head * (spec.query_rank or hidden),
        key_down=float((spec.kv_rank + spec.rope_dim) * hidden),
        key_up=heads * (spec.nope_dim + spec.value_dim) * spec.kv_rank,
    )
    changes = {
        "query": narrow * heads * head,
        "qkv": 0.0,
        "out": heads * spec.value_dim * hidden,
        "rest": block.rest + spec.query_rank + spec.kv_rank,
    }
    return LatentBlock(**own | changes, latent=latent)
