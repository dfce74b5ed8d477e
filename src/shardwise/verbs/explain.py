"""`explain`: one layout's memory, time and neighbours, and what binds."""

from __future__ import annotations

from typing import Any

from shardwise.planner.explanation import Explanation, binding
from shardwise.planner.memory import capacity_bytes, predict_memory
from shardwise.planner.neighbours import neighbours
from shardwise.planner.rank_timeline import predict_schedule, predict_timeline
from shardwise.spec import InputError, Run
from shardwise.verbs.predicted import predict_run


def explain(run: Run | dict[str, Any], *, rank: int | None = None) -> Explanation:
    """Why a Run's layout is as fast and as large as it is. `layout: auto` is the planner's first choice.

    rank: of the world, whose memory and timeline are shown; by default the one with the fullest memory.
    Raises InputError.
    """
    run, found, candidate, notes = predict_run(run if isinstance(run, Run) else Run.load(run))
    layout = found.layout
    if rank is None:
        rank = found.memory.rank
    if not 0 <= rank < layout.world:
        raise InputError(f"--rank {rank}: the layout has ranks 0 to {layout.world - 1}")
    memory = predict_memory(found.subject, stage_rank=rank * layout.pp // layout.world)
    others = neighbours(found, run.recipe)
    return Explanation(
        run=run,
        candidate=candidate,
        micro_batches=found.subject.micro_batches,
        rank=rank,
        memory=memory,
        capacity=capacity_bytes(run.cluster.gpu),
        parts_seconds=found.step.parts,
        binding=binding(found, others),
        timeline=predict_timeline(found.subject, rank),
        schedule=predict_schedule(found.subject) if layout.pp > 1 else [],
        neighbours=others,
        notes=notes,
    )
