"""What one rank computes for one micro-batch in each kind of layer: matrix products, attention, memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec import Layout, Model


@dataclass(frozen=True)
class Gemm:
    """`count` products of (m, k) by (k, n). grouped: one kernel computes them all. parts: the weights that it stands
    for, of n / parts columns each, which our trainer multiplies by one after the other."""

    m: float
    n: float
    k: float
    count: float = 1.0
    grouped: bool = False
    parts: int = 1

    @property
    def flops(self) -> float:
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Elements:
    """What goes through an op that is neither product nor attention: `op` as in spec/calibration.py; how many elements
    in the forward, and in the backward."""

    op: str
    forward: float
    backward: float


@dataclass(frozen=True)
class Scores:
    """The forward of causal attention: FLOPs, and what its rate depends on."""

    flops: float
    length: int
    head_dim: int
    value_dim: int
    queries_per_key: float


@dataclass(frozen=True)
class Work:
    """The forward pass of one layer on one rank. Backward: two products for each one, attention 2.5 times, traffic
    twice. `elements` and `scores` say the same as traffic and attention op by op, for rates that were measured so."""

    gemms: tuple[Gemm, ...] = ()
    attention_flops: float = 0.0
    traffic_bytes: float = 0.0  # read and written by everything that is neither product, attention nor rotation
    rotated: float = 0.0  # elements of queries and keys that a rotary embedding turns
    elements: tuple[Elements, ...] = ()
    scores: tuple[Scores, ...] = ()

    @property
    def gemm_flops(self) -> float:
        return sum(gemm.flops for gemm in self.gemms)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.gemms + other.gemms,
            self.attention_flops + other.attention_flops,
            self.traffic_bytes + other.traffic_bytes,
            self.rotated + other.rotated,
            self.elements + other.elements,
            self.scores + other.scores,
        )


# bf16 values that a block's elementwise ops read and write per token and hidden unit (norms, residuals, casts), and per
# token and inner unit of the MLP (activation and product), when compiled or fused.
_BLOCK_VALUES = 14
_MLP_VALUES = 4


def attention_work(model: Model, layout: Layout, tokens: float, sequence: int) -> Work:
    """Attention with its norm and residual, for `tokens` of this rank out of sequences of `sequence`."""
    tp = layout.tp
    hidden, heads = model.hidden, model.heads / tp
    if model.latent:
        latent = model.latent
        query, value = latent.nope_dim + latent.rope_dim, latent.value_dim
        down = Gemm(tokens / tp, latent.query_rank + latent.kv_rank + latent.rope_dim, hidden)
        up = (
            Gemm(tokens, heads * query, latent.query_rank or hidden),
            Gemm(tokens, heads * (latent.nope_dim + value), latent.kv_rank),
        )
        gemms: tuple[Gemm, ...] = (down, *up, Gemm(tokens, hidden, heads * value))
        score_dims = query + value
    else:
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim / tp
        gemms = (Gemm(tokens, rows, hidden), Gemm(tokens, hidden, heads * model.head_dim))
        score_dims = 2 * model.head_dim
    keys = (sequence + 1) / 2  # causal: what a token sees on average
    if model.sliding_window and model.sliding_window < sequence:
        window = model.sliding_window
        keys = window * (1 - (window - 1) / (2 * sequence))
    traffic = _BLOCK_VALUES * 2 * tokens * hidden / tp
    rotated = 0.0
    if model.positions == "rope":
        rotated = heads * model.latent.rope_dim if model.latent else (heads + model.kv_heads / tp) * model.head_dim
    split = sum(gemm.m * gemm.n for gemm in gemms[:-1])  # what the projections give
    biases = model.qkv_bias * split + model.out_bias * tokens * hidden
    elements = (
        *_around(model, tokens * hidden / tp),
        Elements("rotated_heads" if rotated else "heads", split, split),
        *_bias(biases),
    )
    flops = 2 * tokens * keys * heads * score_dims
    dims = (query, value, 1.0) if model.latent else (model.head_dim, model.head_dim, model.heads / model.kv_heads)
    return Work(gemms, flops, traffic, tokens * rotated, elements, (Scores(flops, sequence, *dims),))


def mlp_work(model: Model, layout: Layout, tokens: float, ffn: int) -> Work:
    """A dense MLP of inner size `ffn`."""
    inner, hidden = ffn / layout.tp, model.hidden
    ups = 2 if model.activation == "swiglu" else 1
    gemms = (Gemm(tokens, ups * inner, hidden, parts=ups), Gemm(tokens, hidden, inner))
    elements = (*_inner(model, tokens * inner, tokens * hidden), *_bias(model.mlp_bias * tokens * (inner + hidden)))
    return Work(gemms, 0.0, _MLP_VALUES * 2 * tokens * inner, elements=elements)


def experts_work(model: Model, layout: Layout, tokens: float) -> Work:
    """Router, shared experts and this rank's routed experts under balanced routing.

    `tokens` are those of one tensor-parallel group; ep divides dp · cp · tp, so with ep > 1 each rank routes its own
    share of them and computes as many rows as it sends.
    """
    experts = model.experts
    assert experts is not None
    mine = tokens / layout.tp
    local = experts.count / layout.ep
    ups = 2 if model.activation == "swiglu" else 1
    rows = mine * experts.top_k / local * (layout.tp if layout.ep == 1 else 1)
    inner = experts.ffn / (layout.tp if layout.ep == 1 else 1)
    routed = (
        Gemm(rows, ups * inner, model.hidden, local, grouped=True, parts=ups),
        Gemm(rows, model.hidden, inner, local, grouped=True),
    )
    traffic = 2 * rows * local * (_MLP_VALUES * inner + 4 * model.hidden)
    copies = rows * local * model.hidden
    elements = (*_inner(model, rows * local * inner, copies), Elements("routing", copies, copies))
    work = Work((Gemm(mine, experts.count, model.hidden), *routed), 0.0, traffic, elements=elements)
    return work + mlp_work(model, layout, tokens, experts.shared_ffn) if experts.shared_ffn else work


def block_work(model: Model, layout: Layout, tokens: float, sequence: int, *, layer: int) -> Work:
    """One whole block."""
    attention = attention_work(model, layout, tokens, sequence)
    attention += Work(elements=tuple(_around(model, tokens * model.hidden / layout.tp)))  # of the MLP
    if model.experts and layer >= model.experts.dense_layers:
        return attention + experts_work(model, layout, tokens)
    return attention + mlp_work(model, layout, tokens, model.ffn)


def _around(model: Model, elements: float) -> tuple[Elements, ...]:
    """Norm and residual of one half of a block. In the backward the residual is the sum of two gradients."""
    return Elements(model.norm, elements, elements), Elements("residual", elements, elements)


def _inner(model: Model, inner: float, outer: float) -> tuple[Elements, ...]:
    """The activation; where a gate and a product go in, their gradients are summed."""
    own = Elements(model.activation, inner, inner)
    return (own, Elements("residual", 0.0, outer)) if model.activation == "swiglu" else (own,)


def _bias(elements: float) -> tuple[Elements, ...]:
    """Kernels of products add biases; only their gradients cost something."""
    return (Elements("bias", 0.0, elements),) if elements else ()


def head_work(model: Model, layout: Layout, tokens: float) -> Work:
    """Output head and loss. In either direction an unfused loss moves about 14 bytes per logit: bf16 to fp32, and fp32
    through the softmax."""
    columns = model.vocabulary / layout.tp
    op = "chunked_loss" if layout.loss == "chunked" else "loss"
    elements = (
        Elements(model.norm, tokens * model.hidden, tokens * model.hidden),
        Elements(op, tokens * columns, tokens * columns),
    )
    return Work((Gemm(tokens, columns, model.hidden),), 0.0, 14 * tokens * columns, elements=elements)
