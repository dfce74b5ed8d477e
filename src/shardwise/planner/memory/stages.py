"""Which layers a pipeline rank holds, and how many micro-batches' activations of them at once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardwise.planner.pipeline import in_flight
from shardwise.planner.schedules import rank_order, stages_of, steady_micro_batches
from shardwise.planner.stages import cut_of
from shardwise.planner.subject import Subject
from shardwise.spec import Layout, Model
from shardwise.spec.combinations import FOLDED

Held = dict[int, int]


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of one stage: how many dense ones, how many of experts."""

    dense: int
    moe: int

    @property
    def layers(self) -> int:
        return self.dense + self.moe


def chunks_of(subject: Subject, layout: Layout, rank: int) -> dict[int, Chunk]:
    """The stages of a pipeline rank, by number, were the subject's layout this one."""
    model = subject.model
    if layout.pp == 1:
        return {0: _chunk(model, range(model.layers))}
    stages = layout.pp * layout.virtual_stages
    if layout.schedule in FOLDED:
        stages = 2 * layout.pp
    cut = cut_of(subject, stages)
    return {
        stage: _chunk(model, cut[stage]) for stage in stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank)
    }


def _chunk(model: Model, layers: range) -> Chunk:
    dense_layers = model.experts.dense_layers if model.experts else model.layers
    dense = max(0, min(layers.stop, dense_layers) - layers.start)
    return Chunk(dense, len(layers) - dense)


def held(schedule: str, pipeline: int, micro_batches: int, virtual: int, rank: int) -> tuple[Held, Held]:
    """Micro-batches in flight by stage of a rank: where they are most in all, and where they are most while the rank
    runs the last stage (empty on ranks without it). The action's own micro-batch counts.

    Raises ValueError for a number of micro-batches that the schedule cannot do.
    """
    if schedule == "gpipe":
        return {rank: micro_batches}, {rank: micro_batches} if rank == pipeline - 1 else {}
    few = steady_micro_batches(schedule, pipeline, micro_batches)
    return _held(schedule, pipeline, few, virtual, rank)


@functools.lru_cache(maxsize=4096)
def _held(schedule: str, pipeline: int, micro_batches: int, virtual: int, rank: int) -> tuple[Held, Held]:
    program = rank_order(schedule, pipeline, micro_batches, virtual, rank)
    last = (2 if schedule in FOLDED else virtual) * pipeline - 1
    counts = in_flight(program)
    head = [now for now, action in zip(counts, program, strict=True) if action.stage == last]
    return max(counts, key=_total), max(head, key=_total, default={})


def _total(counts: Held) -> int:
    return sum(counts.values())
