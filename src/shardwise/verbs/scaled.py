"""A user's Run made small enough for the CPU ranks of one machine: the same kind of layout and of model. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from shardwise.spec import InputError, Layout, Model, Recipe, Run
from shardwise.spec.experts import Experts, LatentAttention
from shardwise.spec.legality import divisors, illegal

STEPS = 3
_SEQUENCE = 32
_DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
_FIXED_STAGES = {"gpipe": 1, "1f1b": 1}  # of a rank; all other schedules have several, and 2 are enough


def scale_down(run: Run, most_ranks: int, precision: str, model: Model | None = None) -> Run:
    """A Run of the same kind on at most `most_ranks` ranks, with 3 SGD steps, momentum and clipping.

    Every degree above 1 stays above 1; schedule, ZeRO stage, recompute, offload, loss and method of context
    parallelism stay; what is compiled is not. The model is as deep as its stages need and narrow, or `model` as it is.
    Raises InputError where no such layout is small enough.
    """
    layout = run.fixed_layout
    reasons: list[str] = []
    for small in _layouts(layout):
        if small.world > most_ranks:
            continue
        scaled = _scaled_run(run, small, precision, model)
        problems = list(illegal(scaled.model, scaled.fixed_layout, scaled.recipe))
        if not problems:
            return scaled
        reasons = reasons or problems
    if reasons:
        raise InputError("the layout cannot be scaled down for this model: " + "\n".join(reasons))
    least = min(small.world for small in _layouts(layout))
    raise InputError(
        f"--nproc {most_ranks}: {layout.describe()} with 2 ranks in each of its dimensions still has {least} ranks; "
        f"nearest: --nproc {least}"
    )


def one_process(scaled: Run) -> Run:
    """The same training without any layout."""
    layout = Layout.load({"micro_batch": scaled.recipe.batch_sequences})
    return scaled.replace(layout=layout, cluster=_cluster(scaled, 1))


def _layouts(layout: Layout) -> Iterator[Layout]:
    """Smaller layouts of the same kind, the likest and smallest first. Where experts are spread over a part of the
    ranks that they could be spread over, so they are here, if the world allows it."""
    sizes = {name: [2] if getattr(layout, name) > 1 else [1] for name in _DEGREES}
    if layout.ep > 1 and layout.dp_shard > 2:
        sizes["dp_shard"].append(4)
    changes = {"compile": False, "async_tp": False, "micro_batch": min(layout.micro_batch, 2)}
    changes |= {"recompute": "every:2" if layout.recompute.startswith("every:") else layout.recompute}
    if layout.recompute == "every:1":
        changes["recompute"] = "every:1"
    if layout.pp > 1:
        changes["virtual_stages"] = _FIXED_STAGES.get(layout.schedule, 2)
    small = []
    for values in itertools.product(*sizes.values()):
        degrees = dict(zip(_DEGREES, values, strict=True))
        span = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
        for ep in [n for n in divisors(span) if n > 1] if layout.ep > 1 else [1]:
            small.append(layout.model_copy(update={**degrees, **changes, "ep": ep}))
    like = _spread_of_experts(layout)
    unlike = [sum(a != b for a, b in zip(_spread_of_experts(item), like, strict=True)) for item in small]
    return (small[i] for i in sorted(range(len(small)), key=lambda i: (unlike[i], small[i].world, small[i].ep)))


def _spread_of_experts(layout: Layout) -> tuple[bool, ...]:
    """Over all ranks that may have them? Beyond those of tensor parallelism, and of context parallelism, too?"""
    span = layout.dp_shard * layout.cp * layout.tp
    return layout.ep == span, layout.ep > layout.tp, layout.ep > layout.tp * layout.cp


def _scaled_run(run: Run, layout: Layout, precision: str, model: Model | None) -> Run:
    before = run.fixed_layout
    sequence = _sequence(run, layout, model)
    model = model or _scaled_model(run.model, before, layout, sequence)
    recipe = run.recipe
    per_rank = before.data_ranks * before.micro_batch
    accumulates = not recipe.batch_tokens or recipe.batch_sequences > per_rank
    micro_batches = 2 * layout.pp if layout.pp > 1 else 2 if accumulates else 1
    small = Recipe.load(
        {
            "sequence": sequence,
            "batch_tokens": layout.data_ranks * layout.micro_batch * micro_batches * sequence,
            "steps": STEPS,
            "seed": recipe.seed,
            "precision": precision,
            "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5, "clip": 1.0},
            "schedule": {"name": "constant"},
            "balance": recipe.balance.dump(),
            "evaluation": {"tokens": 0},
        }
    )
    scaled = run.replace(model=model, layout=layout, recipe=small)
    return scaled.replace(cluster=_cluster(scaled, layout.world))


def _cluster(run: Run, ranks: int) -> Any:
    return Run.load({"model": run.model, "cluster": {"gpu": "cpu", "gpus": ranks}, "recipe": {}}).cluster


def _sequence(run: Run, layout: Layout, model: Model | None) -> int:
    """Short, and a multiple of what context and tensor parallelism cut."""
    most = min(_SEQUENCE, run.recipe.sequence)
    if model is not None:
        most = min(most, model.sliding_window or most, model.max_sequence if model.positions == "learned" else most)
    cut = (2 * layout.cp if layout.cp > 1 else 1) * layout.tp
    return max(cut, most // cut * cut)


def _scaled_model(model: Model, before: Layout, layout: Layout, sequence: int) -> Model:
    tp = layout.tp
    heads, kv_heads = _heads(model, before, layout)
    fields: dict[str, Any] = {
        **{name: getattr(model, name) for name in type(model).model_fields},
        "name": f"{model.name}, scaled down",
        "layers": _layers(model, before, layout),
        "hidden": min(model.hidden, 32),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": min(model.head_dim, 8),
        "ffn": _narrow(model.ffn, 48, tp),
        "vocabulary": _narrow(model.vocabulary, 96, tp),
    }
    if model.positions == "learned":
        fields["max_sequence"] = min(model.max_sequence, 2 * sequence)
    if model.experts:
        fields["experts"] = _experts(model.experts, layout)
    if model.latent:
        fields["latent"] = _latent(model.latent)
    rotary = fields["latent"].rope_dim if model.latent else fields["head_dim"]
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "longrope":  # a divisor for every pair of dimensions
        shorter = {name: getattr(scaling, name)[: rotary // 2] for name in ("short_factors", "long_factors")}
        fields["rope_scaling"] = scaling.model_copy(update=shorter)
    return Model.load(fields)


def _layers(model: Model, before: Layout, layout: Layout) -> int:
    """One for every stage, and one more where stages had unequal numbers; enough for what is chosen by layer."""
    stages = layout.pp * layout.virtual_stages
    least = stages + (model.layers % (before.pp * before.virtual_stages) > 0)
    if model.experts:
        least = max(least, min(model.experts.dense_layers, 1) + 1)
    chosen = {"sqrt": 4}.get(layout.recompute, 3 if layout.recompute.startswith("every:") else 2)
    return min(model.layers, max(least, chosen))


def _heads(model: Model, before: Layout, layout: Layout) -> tuple[int, int]:
    """Heads and KV heads: grouped where they were, and fewer KV heads than tensor-parallel ranks where that was so."""
    parts = layout.tp * (layout.cp if layout.cp_method == "ulysses" else 1)
    if model.latent:
        heads = max(2, parts)
        return heads, heads
    scarce = model.kv_heads == 1 or model.kv_heads < before.tp
    kv_heads = 1 if scarce else max(2, parts)
    group = 1 if model.heads == model.kv_heads else 2
    heads = kv_heads * group
    return math.lcm(heads, layout.tp), kv_heads


def _experts(experts: Experts, layout: Layout) -> Experts:
    groups = min(experts.groups, 4)
    top_groups = groups if experts.top_groups == experts.groups else min(experts.top_groups, 2, groups - 1)
    unit = math.lcm(groups, layout.ep)
    count = -(-min(experts.count, 8) // unit) * unit
    return experts.model_copy(
        update={
            "count": count,
            "top_k": min(experts.top_k, 2, count // groups * top_groups),
            "groups": groups,
            "top_groups": top_groups,
            "ffn": _narrow(experts.ffn, 16, layout.tp),
            "shared_ffn": _narrow(experts.shared_ffn, 16, layout.tp) if experts.shared_ffn else 0,
            "dense_layers": min(experts.dense_layers, 1),
        }
    )


def _latent(latent: LatentAttention) -> LatentAttention:
    most = {"query_rank": 12, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 6}
    return latent.model_copy(update={name: min(getattr(latent, name), size) for name, size in most.items()})


def _narrow(size: int, most: int, parts: int) -> int:
    """At most `most`, and a multiple of `parts`."""
    return max(parts, min(size, most) // parts * parts)
