"""The search space: every legal set of degrees with its micro-batches, recompute policies and schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from shardwise.planner.estimate import Space
from shardwise.planner.stacks import generation
from shardwise.planner.subject import assumed_micro_batches
from shardwise.spec import Cluster, Layout, Model, Recipe
from shardwise.spec.legality import divisors, enough_micro_batches, illegal

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_SCHEDULES = (("1f1b", (1,)), ("gpipe", (1,)), ("interleaved", (2, 3, 4, 5, 6, 8)), ("interleaved-zb", (2, 4)),
              ("zbv", (2,)), ("dualpipev", (2,)))  # fmt: skip
_RECOMPUTES = ("none", "selective", "full")
_LOSSES = ("full", "chunked")
_OFFLOADS = ("none", "optimizer", "parameters", "activations")


def spaces(model: Model, cluster: Cluster, recipe: Recipe, rejected: Counter[str]) -> list[Space]:
    """One Space for each tp, cp, pp and ep with which something is legal. What is refused is counted in `rejected`, by
    reason."""
    splits: dict[tuple[int, ...], list[Layout]] = {}
    unlimited = recipe.model_copy(update={"batch_tokens": None})
    for layout in _degrees(model, cluster):
        problem = next(illegal(model, layout, unlimited), None)
        if problem:
            rejected[_reason(problem)] += 1
        else:
            splits.setdefault((layout.tp, layout.cp, layout.pp, layout.ep), []).append(layout)
    found = [_space(model, recipe, tuple(layouts), rejected) for layouts in splits.values()]
    return [space for space in found if space]


def variants(cluster: Cluster) -> list[tuple[str, str]]:
    """(loss, offload), the plain one first: all others take longer. A CPU has no host to offload to."""
    offloads = _OFFLOADS if generation(cluster.gpu) != "cpu" else ("none",)
    return [(loss, offload) for offload in offloads for loss in _LOSSES]


def _space(model: Model, recipe: Recipe, splits: tuple[Layout, ...], rejected: Counter[str]) -> Space | None:
    """All layouts of the same tp, cp, pp and ep have as many data ranks, and so the same micro-batches."""
    data, pipeline = splits[0].data_ranks, splits[0].pp
    sizes = []
    for micro_batch in _MICRO_BATCHES:
        if not recipe.batch_tokens:
            sizes.append((micro_batch, assumed_micro_batches(splits[0])))
        elif recipe.batch_sequences % (data * micro_batch):
            rejected["the batch does not divide over data ranks and micro-batches"] += len(splits)
        else:
            sizes.append((micro_batch, recipe.batch_sequences // (data * micro_batch)))
    schedules = [
        (schedule, virtual)
        for schedule, chunks in (_SCHEDULES if pipeline > 1 else _SCHEDULES[:1])
        for virtual in chunks
        if pipeline * virtual <= model.layers
    ]
    allowed = {
        size: tuple(pipeline == 1 or enough_micro_batches(schedule, pipeline, size[1]) for schedule, _ in schedules)
        for size in sizes
    }
    for able in allowed.values():
        for (schedule, _), can in zip(schedules, able, strict=True):
            if not can:
                rejected[f"{schedule} cannot do so few micro-batches, or not that number"] += len(splits)
    usable = tuple(size for size in sizes if any(allowed[size]))
    if not usable:
        return None
    return Space(splits, usable, _RECOMPUTES, tuple(schedules), tuple(allowed[size] for size in usable))


def _degrees(model: Model, cluster: Cluster) -> Iterator[Layout]:
    """All products of degrees that make the number of chips; tensor parallelism stays within the fast domain."""
    gpus, domain = cluster.gpus, min(cluster.gpus, cluster.gpu.domain)
    for tp in (n for n in divisors(gpus) if n <= domain):
        for pp in (n for n in divisors(gpus // tp) if n <= model.layers):
            for cp in divisors(gpus // (tp * pp)):
                data = gpus // (tp * pp * cp)
                for shard in divisors(data):
                    for ep in divisors(shard * cp * tp) if model.experts else [1]:
                        for zero in _stages(shard, data):
                            yield Layout.model_construct(
                                dp_replicate=data // shard, dp_shard=shard, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero
                            )


def _stages(shard: int, data: int) -> tuple[Literal[0, 1, 2, 3], ...]:
    """ZeRO-1 shares its states over all data ranks, however these are split."""
    if shard == 1:
        return (0,)
    return (1, 2, 3) if shard == data else (2, 3)


def _reason(problem: str) -> str:
    """A refusal without its numbers, so that equal ones can be counted."""
    words = [word for word in problem.split(";")[0].split() if not any(char.isdigit() for char in word)]
    return " ".join(words)
