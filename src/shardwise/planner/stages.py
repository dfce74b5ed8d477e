"""Which layers each pipeline stage has: stages of equal predicted cost, not of equal numbers of layers."""

from __future__ import annotations

import functools

from shardwise.planner.schedules import stages_of
from shardwise.planner.stacks import Stack
from shardwise.planner.subject import Subject
from shardwise.planner.work import Work, block_work, head_work
from shardwise.spec import Layout, Model


def own_stages(model: Model, layout: Layout, sequence: int, rank: int) -> dict[int, range]:
    """The stages of one pipeline rank, by number, and the layers of each."""
    if layout.pp == 1:
        return {0: range(model.layers)}
    ranges = stage_layers(model, layout.pp * layout.virtual_stages, sequence)
    return {stage: ranges[stage] for stage in stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank)}


def cuts_by_cost(stack: Stack) -> bool:
    """Whether this software's stages are of equal cost, as ours are, and not of equal numbers of layers."""
    return stack.name == "shardwise"


def cut_of(subject: Subject, stages: int) -> tuple[range, ...]:
    """The layers of each stage as the subject's software cuts them: ours by cost, all others by number."""
    if cuts_by_cost(subject.stack) and stages > 1:
        return stage_layers(subject.model, stages, subject.sequence)
    layers = subject.model.layers
    return tuple(range(-(-stage * layers // stages), -(-(stage + 1) * layers // stages)) for stage in range(stages))


@functools.lru_cache(maxsize=4096)
def stage_layers(model: Model, stages: int, sequence: int) -> tuple[range, ...]:
    """The layers of each stage, of which every one has at least one. The costliest stage is as cheap as can be; the
    last one has the head and the loss, too, and what rounding leaves goes to later stages, since earlier ones hold
    more micro-batches. Costs are FLOPs of the forward pass. Raises ValueError for more stages than layers.
    """
    if stages > model.layers:
        raise ValueError(f"{stages} stages need as many layers, but the model has {model.layers}")
    one = Layout.model_construct(dp_replicate=1, dp_shard=1, tp=1, cp=1, pp=1, ep=1, zero=0)
    costs = [_flops(block_work(model, one, 1, sequence, layer=layer)) for layer in range(model.layers)]
    head = _flops(head_work(model, one, 1))
    low, high = max(costs), sum(costs) + head
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _cut(costs, head, stages, middle, even=False) else (middle, high)
    ranges = _cut(costs, head, stages, high, even=True) or _cut(costs, head, stages, high, even=False)
    assert ranges is not None
    return ranges


def _cut(costs: list[float], head: float, stages: int, most: float, *, even: bool) -> tuple[range, ...] | None:
    """Fill stages of at most `most`, the last one first; with `even` no further than to the mean of those that are
    left. None where the layers do not fit."""
    end, left = len(costs), sum(costs) + head
    ranges = []
    for stage in reversed(range(stages)):
        begin, cost = end, head if stage == stages - 1 else 0.0
        mean = left / (stage + 1)
        while begin > stage:  # the stages before this one need a layer each
            more = cost + costs[begin - 1]
            if begin < end and (more > most * (1 + 1e-9) or (even and cost >= mean * (1 - 1e-9))):
                break
            begin, cost = begin - 1, more
            if stage > 0 and begin == stage:
                break
        ranges.append(range(begin, end))
        end, left = begin, left - cost
    return tuple(reversed(ranges)) if end == 0 and _fits(costs, head, ranges, most) else None


def _fits(costs: list[float], head: float, ranges: list[range], most: float) -> bool:
    """Whether the stages (last first) are within `most`; a last stage of one layer may be above it."""
    sums = [sum(costs[layer] for layer in layers) for layers in ranges]
    if len(ranges[0]) > 1:
        sums[0] += head
    return max(sums) <= most * (1 + 1e-9)


def _flops(work: Work) -> float:
    return work.gemm_flops + work.attention_flops
