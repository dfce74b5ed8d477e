"""What autograd keeps of one block from its forward to its backward, operator by operator.

Measured on the real module: tests/unit/test_planner_memory_activations.py holds these tables equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.spec import Layout, Model

# Routed tokens of the fullest rank over the mean, where a loss or a bias balances the router.
IMBALANCE = 1.1

# How much of a block's forward runs again in its backward. "alternate": selective, but every other product runs again
# (torchtitan's default).
Policy = Literal["none", "selective", "alternate", "full"]

_INPUT = ("none", "selective", "alternate", "full")
_PRODUCT = ("none", "selective", "alternate")  # outputs of products and of attention
_SECOND = ("none", "selective")
_REST = ("none",)
_OUTPUT = ("selective", "alternate")  # products whose output the backward does not need; the policies keep it anyway


@dataclass(frozen=True)
class Kept:
    """One saved tensor: bytes per token of the rank's micro-batch, and the policies under which it stays."""

    operator: str
    bytes: float
    under: tuple[str, ...] = _REST


@dataclass(frozen=True)
class Style:
    """How a software writes the block, as far as it decides what is kept.

    fused: elementwise chains are one kernel each (torch.compile, Transformer Engine), whose inner results are not kept.
    gathered: sequence-parallel inputs of products stay gathered, instead of being gathered again in the backward.
    split_projections: queries, keys and values are three products, so that values do not hold on to the other two.
    repeats_kv: keys and values are copied for every query head. dropout: masks of one byte on both residual branches.
    scores: attention without a fused kernel, which keeps its softmax. wide_router: the router's product takes a copy of
    its input in fp32, which is kept in the place of the input.
    """

    fused: bool = False
    gathered: bool = True
    split_projections: bool = False
    repeats_kv: bool = False
    dropout: bool = False
    scores: bool = False
    wide_router: bool = False


def block_kept(
    model: Model,
    layout: Layout,
    style: Style,
    *,
    moe: bool,
    sequence: int,
    sequence_parallel: bool = True,
    width: int = 2,
) -> list[Kept]:
    """What one block keeps. sequence: tokens of a whole sequence; width: bytes of an activation."""
    tp, hidden = layout.tp, width * model.hidden
    own = 1 / tp if sequence_parallel else 1.0  # share of the residual stream that is on this rank
    inner = hidden * (1.0 if style.gathered else own)  # inputs of column-parallel products
    statistics = (8 if model.norm == "layernorm" else 4) * own
    kept = [Kept("block input", hidden * own, _INPUT), Kept("attention_norm", statistics)]
    if model.latent:
        kept += _latent(model, tp, width, own)
    else:
        kept += [Kept("qkv input", inner), *_attention(model, layout, style, width)]
    # Without recompute the sum with the residual is kept in the product's place: as many bytes.
    kept += [Kept("attention.out", hidden * own, _SECOND), Kept("mlp_norm", statistics)]
    if not moe or not style.wide_router or (model.experts and model.experts.shared_ffn):
        kept += [Kept("mlp input", inner)]
    if own < 1 and not style.fused:  # before they are summed over ranks and shared out, products are whole
        kept += [Kept("product of attention.out", hidden, ("selective",))]
        kept += [] if moe else [Kept("product of mlp.down", hidden, ("selective",))]
    if style.scores:
        kept.append(Kept("softmax", width * model.heads / tp * sequence))
    if style.dropout:
        kept.append(Kept("dropout masks", 2 * model.hidden * own))
    if moe:
        return kept + _experts(model, layout, style, width, own)
    return [*kept, *_mlp(model, style, width * model.ffn / tp, "mlp"), Kept("mlp.down", hidden * own, _OUTPUT)]


def _attention(model: Model, layout: Layout, style: Style, width: int) -> list[Kept]:
    queries, keys = (width * heads * model.head_dim / layout.tp for heads in (model.heads, model.kv_heads))
    rope, grouped = model.positions == "rope", model.heads > model.kv_heads
    changed = rope or model.qk_norm  # what attention keeps is not what the projection gave
    kept = []
    if style.split_projections:
        under = _OUTPUT if changed and not model.qk_norm else _PRODUCT
        kept += [Kept("query product", queries, under), Kept("value product", keys, _PRODUCT)]
        kept += [Kept("key product", keys, ("selective",) if under == _OUTPUT else _SECOND)]
    else:
        kept += [Kept("qkv", queries + 2 * keys, _PRODUCT)]  # values are a view that holds on to all of it
        if grouped and (model.qk_norm or not changed):
            kept += [Kept("query copy", queries)]
    if changed and not (style.fused and not style.split_projections):
        kept += [Kept("rotated query", queries), Kept("rotated key", keys)]
    if model.qk_norm:
        kept += [Kept("qk_norm", 4 * (model.heads + model.kv_heads) / layout.tp)]
    if style.repeats_kv and grouped:
        kept += [Kept("repeated keys and values", 2 * queries - 2 * keys)]
    if layout.cp > 1 and layout.cp_method == "allgather":
        kept += [Kept("gathered keys and values", 2 * keys * (layout.cp - 1))]
    return [*kept, Kept("attention", queries, _PRODUCT), Kept("logsumexp", 4 * model.heads / layout.tp, _PRODUCT)]


def _latent(model: Model, tp: int, width: int, own: float) -> list[Kept]:
    """Multi-head latent attention (arXiv 2405.04434): queries and keys are put together from their halves. Ranks of
    tensor parallelism compute the latents of their own tokens, and gather these in the place of the input."""
    latent = model.latent
    assert latent is not None
    heads, hidden = model.heads / tp, width * model.hidden
    query, value = width * heads * (latent.nope_dim + latent.rope_dim), width * heads * latent.value_dim
    keys = latent.kv_rank + latent.rope_dim
    return [
        Kept("latents' input", hidden * own),
        Kept("query input", hidden * (not latent.query_rank and own < 1)),
        Kept("query latent", width * latent.query_rank, ("none", "alternate")),
        Kept("query latent of own tokens", width * latent.query_rank * own, ("selective",)),
        Kept("query latent norm", (width * latent.query_rank + 4) * bool(latent.query_rank)),
        Kept("query product", query, _OUTPUT),
        Kept("key latent", width * keys, ("none", "alternate")),
        Kept("key latent of own tokens", width * keys * own, ("selective",)),
        Kept("key latent norm", width * latent.kv_rank + 4),
        Kept("key product", width * heads * latent.nope_dim + value, _PRODUCT),
        Kept("rotated query and key", 2 * query),
        Kept("attention", value, _PRODUCT),
        Kept("logsumexp", 4 * heads, _PRODUCT),
    ]


def _mlp(model: Model, style: Style, inner: float, name: str) -> list[Kept]:
    if model.activation == "gelu":
        return [Kept(f"{name}.up", inner, _PRODUCT), Kept(f"{name}.gelu", inner)]
    kept = [Kept(f"{name}.gate", inner, _PRODUCT), Kept(f"{name}.up", inner, _SECOND), Kept(f"{name}.product", inner)]
    return kept if style.fused else [*kept, Kept(f"{name}.silu", inner)]


def _experts(model: Model, layout: Layout, style: Style, width: int, own: float) -> list[Kept]:
    """Router, dispatched tokens, routed and shared experts. With ep > 1 each rank routes its own tokens, of which
    copies leave and others' arrive; without, ranks of tensor parallelism gather the tokens that they have routed."""
    experts = model.experts
    assert experts is not None
    away = layout.ep > 1
    copies = experts.top_k * (own if away else 1.0)
    rows, ffn = (copies * IMBALANCE, float(experts.ffn)) if away else (copies, experts.ffn / layout.tp)
    hidden, wide = width * model.hidden, max(4, width)
    normalized = (experts.top_k + 1) * wide * experts.normalized  # the chosen scores and their sum
    index = 8
    copied = style.wide_router and (width < wide or own < 1 or not experts.shared_ffn)  # else it is the shared experts'
    kept = [
        Kept("router", wide * experts.count * own, _SECOND),  # scores; where these are computed again, logits
        Kept("router input", wide * model.hidden * own * copied),
        Kept("choices", (index * experts.top_k + normalized) * own),
        Kept("order of copies", (2 * index + wide) * copies + index * rows * away),  # there, back, and weights
        # Copies that were only sorted are sorted again.
        Kept("dispatched tokens", hidden * rows, _PRODUCT if away or style.fused else ("none", "alternate")),
        *_mlp(model, style, width * ffn * rows, "experts"),
        Kept("experts.down", hidden * copies, _PRODUCT),  # as it came back
    ]
    if away and not style.fused:
        kept += [Kept("experts.down there", hidden * rows, _SECOND)]  # index_copy keeps its source
    if own < 1 and not away and not style.fused:
        kept += [Kept("sum over ranks", hidden * own, ("selective",))]
    if experts.shared_ffn:
        kept += [*_mlp(model, style, width * experts.shared_ffn / layout.tp, "shared")]
        kept += [Kept("shared.down", hidden * own, _OUTPUT)]
        if own < 1 and not style.fused:
            kept += [Kept("product of shared.down", hidden, ("selective",))]
    if experts.shared_gate:
        gated = hidden * (1 + (own < 1)) * own  # the product, and the gate's input where the experts' is gathered
        kept += [Kept("gated", gated), Kept("shared gate", width * own, _SECOND)]
    return kept


def kept_bytes(kept: list[Kept], policy: Policy) -> float:
    """Bytes per token that a block keeps under a recompute policy."""
    return sum(item.bytes for item in kept if policy in item.under)
