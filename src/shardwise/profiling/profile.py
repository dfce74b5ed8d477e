"""Profile: traces of one or many ranks, analysed; beside the planner's prediction where the Run is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwise.planner.rank_timeline import predict_timeline
from shardwise.planner.search import Found
from shardwise.profiling.breakdown import Breakdown, RankParts, StepParts
from shardwise.profiling.groups import by_layout
from shardwise.profiling.kernels import Kernel, product_roofline, slowest_kernels
from shardwise.profiling.losses import evidence, weigh
from shardwise.profiling.ranks import Straggler, critical, straggler, waits
from shardwise.profiling.remedies import remedies
from shardwise.profiling.stall import longest_stall
from shardwise.profiling.steps import find_steps
from shardwise.profiling.trace import Trace
from shardwise.profiling.tracks import timeline_of
from shardwise.spec import InputError, Run
from shardwise.spec.diagnosis import Diagnosis
from shardwise.timeline import Timeline


@dataclass(frozen=True)
class Recompilation:
    """One compilation within the profiled steps, as torch reports it."""

    function: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What the steps were before they were traced, since tracing slows the host down. Medians of the critical rank."""

    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    hfu: float | None
    input_fraction: float
    peak_memory_gib: float | None = None


@dataclass(frozen=True)
class Profile:
    """`timelines`: of one step of the middle, per rank; `predicted`: the planner's for the critical rank's place.

    comparison: part of the step to (predicted, measured) seconds; None where one of them is not known.
    """

    ranks: tuple[RankParts, ...]
    critical: int  # rank
    kernels: tuple[Kernel, ...]
    diagnosis: Diagnosis
    straggler: Straggler | None
    timelines: tuple[Timeline, ...]
    chip: str | None
    recompilations: tuple[Recompilation, ...] = ()
    measured: Measured | None = None
    predicted: Timeline | None = None
    predicted_seconds: float | None = None
    comparison: dict[str, tuple[float | None, float]] = field(default_factory=dict)
    run: Run | None = None
    notes: tuple[str, ...] = ()

    @property
    def mean(self) -> StepParts:
        """The mean step of the critical rank."""
        return next(rank for rank in self.ranks if rank.rank == self.critical).mean()

    def dump(self) -> dict[str, Any]:
        """What `--json` prints; `null` where something is unknown."""
        return {
            "diagnosis": self.diagnosis.model_dump(mode="json", by_alias=True),
            "critical_rank": self.critical,
            "chip": self.chip,
            "measured": asdict(self.measured) if self.measured else None,
            "ranks": [
                {
                    "rank": rank.rank,
                    "steps_found_by": rank.how,
                    "steps": [
                        _step(step, None if rank.waited is None else rank.waited[index])
                        for index, step in enumerate(rank.steps)
                    ],
                }
                for rank in self.ranks
            ],
            "straggler": asdict(self.straggler) if self.straggler else None,
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "recompilations": [asdict(item) for item in self.recompilations],
            "predicted_step_seconds": self.predicted_seconds,
            "comparison": {
                part: {"predicted_seconds": predicted, "measured_seconds": measured}
                for part, (predicted, measured) in self.comparison.items()
            },
            "notes": list(self.notes),
        }


def _step(step: StepParts, waited: float | None) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "parts_seconds": step.parts,
        "communication_seconds": step.communication,
        "exposed_seconds": step.exposed,
        "groups": [
            {"collective": collective, "group": group, "seconds": total, "exposed_seconds": exposed, "count": count}
            for (collective, group), (total, exposed, count) in step.by_group.items()
        ],
        "waited_for_ranks_seconds": waited,
        "packing_seconds": step.packing,
        "launches": step.launches,
        "compilations": step.compilations,
    }


def analyse(
    traces: Sequence[Trace],
    *,
    run: Run | None = None,
    found: Found | None = None,
    measured: Measured | None = None,
    recompilations: Sequence[Recompilation] = (),
    notes: Sequence[str] = (),
) -> Profile:
    """Everything that traces say. run, found: what was trained and what the planner predicts for it.

    Raises InputError where a trace has no step with anything in it.
    """
    if run is not None:
        traces = [by_layout(trace, run.fixed_layout) for trace in traces]
    windows, ranks, gaps = [], [], []
    for trace in traces:
        steps, how = find_steps(trace)
        breakdown = Breakdown(trace)
        parts = [(window, breakdown.step(window)) for window in steps]
        parts = [(window, step) for window, step in parts if step.launches]
        if not parts:
            raise InputError(f"{trace.source}: rank {trace.rank} has no step in which a kernel or an operator ran")
        windows.append([window for window, _ in parts])
        gaps.append(breakdown.host_gaps)
        ranks.append(RankParts(trace.rank, tuple(step for _, step in parts), how))
    waited = waits(traces, windows)
    if waited is not None:
        ranks = [
            replace(rank, steps=rank.steps[: len(own)], waited=tuple(own))
            for rank, own in zip(ranks, waited, strict=True)
        ]
    last = critical(ranks)
    place = ranks.index(last)
    late = straggler(ranks)
    compiled = sum(item.seconds for item in recompilations) / len(last.steps)
    stall = longest_stall(traces[place], gaps[place], windows[place])
    losses = weigh(last, late, product_roofline(traces[place], windows[place]), compiled, stall)
    diagnosis = Diagnosis(
        bottleneck=losses.bottleneck,
        rank=last.rank,
        step_seconds=losses.mean.seconds,
        seconds=losses.seconds.get(losses.bottleneck, 0.0),
        evidence=(*evidence(losses, traces[place], ranks), *_reasons(losses.bottleneck, recompilations)),
        remedies=remedies(losses, found, run.recipe if run else None),
        losses=losses.seconds,
    )
    timelines = [
        timeline_of(trace, own[min(len(own) - 1, len(own) // 2)]) for trace, own in zip(traces, windows, strict=True)
    ]
    predicted = None
    if found is not None and last.rank < found.layout.world:
        predicted = predict_timeline(found.subject, last.rank)
    if len(traces) > 1 and waited is None:
        notes = (*notes, "the collectives of these ranks do not match in number, so who waits for whom is not known")
    return Profile(
        tuple(ranks),
        last.rank,
        slowest_kernels(traces[place], windows[place]),
        diagnosis,
        late,
        tuple(timelines),
        traces[place].chip,
        tuple(recompilations),
        measured,
        predicted,
        found.step.seconds if found else None,
        compare_parts(found, losses.mean) if found else {},
        run,
        (*(note for trace in traces for note in trace.notes), *notes),
    )


def _reasons(bottleneck: str, recompilations: Sequence[Recompilation]) -> list[str]:
    if bottleneck != "recompilation":
        return []
    return [f"{item.function} ({item.seconds:.1f} s): {item.reason}" for item in recompilations[:3]]


def compare_parts(found: Found, mean: StepParts) -> dict[str, tuple[float | None, float]]:
    """The planner's parts of the step beside the measured ones. What it does not model is None."""
    own, parts = found.step.parts, mean.parts
    exposed = mean.exposed
    rows: dict[str, tuple[float | None, float]] = {
        "compute": (own["compute"] + own["recompute"], parts["compute"] + parts["memory_bound"]),
        "optimizer": (own["optimizer"], parts["optimizer"]),
        "exposed data": (own["data"], exposed.get("all_gather", 0.0) + exposed.get("reduce_scatter", 0.0)),
        **{f"exposed {kind}": (own[kind], exposed.get(kind, 0.0)) for kind in ("tensor", "context", "expert")},
        "bubble": (own["bubble"], exposed.get("pipeline", 0.0)),
        "copies": (own["offload"], parts["copy"]),
        "input": (None, parts["input"]),
        "host": (None, parts["host"] + parts["synchronisation"] + parts["recompilation"]),
        "other": (None, parts["checkpoint"] + parts["idle"]),
        "step": (found.step.seconds, mean.seconds),
    }
    worth = 1e-3 * min(mean.seconds, found.step.seconds)
    return {part: pair for part, pair in rows.items() if max(pair[0] or 0.0, pair[1]) > worth}
