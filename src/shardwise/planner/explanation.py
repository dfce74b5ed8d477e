"""Explanation: everything that is said about one rank of one layout, and what binds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.planner.memory import capacity_bytes
from shardwise.planner.neighbours import Neighbour
from shardwise.planner.search import Found
from shardwise.spec import Run
from shardwise.spec.memory import GIB, Memory
from shardwise.spec.plan import Candidate
from shardwise.timeline import Box, Timeline

_WORTH = 0.02  # share of the step from which a faster choice that does not fit counts


@dataclass(frozen=True)
class Binding:
    """`what`: memory, compute, communication or bubble; `why` says it with figures."""

    what: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """`memory` is of `rank`, `candidate.memory` of the fullest rank. `schedule`: the actions of all pipeline ranks,
    empty without a pipeline. `parts_seconds`: the step of the busiest rank by kind."""

    run: Run
    candidate: Candidate
    micro_batches: int
    rank: int
    memory: Memory
    capacity: float | None  # bytes that a process can use, where that is known
    parts_seconds: dict[str, float]
    binding: Binding
    timeline: Timeline
    schedule: list[list[Box]]
    neighbours: tuple[Neighbour, ...]
    notes: tuple[str, ...] = ()

    def dump(self) -> dict[str, Any]:
        """Plain types; `null` where something is unknown."""
        timeline = self.timeline
        return {
            **self.candidate.model_dump(mode="json", by_alias=True),
            "micro_batches": self.micro_batches,
            "rank": self.rank,
            "rank_memory": self.memory.model_dump(mode="json", by_alias=True),
            "capacity_gib": self.capacity / GIB if self.capacity else None,
            "parts_seconds": self.parts_seconds,
            "binds": asdict(self.binding),
            "timeline": {
                "seconds": timeline.seconds,
                "streams": {
                    name: {"busy_seconds": timeline.busy(name), "exposed_seconds": timeline.exposed(name)}
                    for name in timeline.streams
                },
            },
            "neighbours": [_plain(item) for item in self.neighbours],
            "notes": list(self.notes),
        }


def binding(found: Found, others: Sequence[Neighbour]) -> Binding:
    """Memory binds where the layout does not fit, or where a neighbour would be faster but does not; else what most of
    the step goes to."""
    capacity = capacity_bytes(found.subject.cluster.gpu)
    used = found.memory.used
    if found.verdict == "oom" and capacity is not None:
        return Binding("memory", f"at least {used[0] / GIB:.1f} GiB are used, and {capacity / GIB:.1f} GiB can be had")
    barred = [item for item in others if item.verdict == "oom" and (item.step_change or 0.0) <= -_WORTH]
    if barred:
        best = min(barred, key=lambda item: item.step_change or 0.0)
        return Binding("memory", f"a faster neighbour does not fit ({best.line()})")
    parts = found.step.parts
    shares = {
        "compute": parts["compute"] + parts["recompute"] + parts["optimizer"],
        "communication": sum(parts[kind] for kind in ("data", "tensor", "context", "expert", "offload")),
        "bubble": parts["bubble"],
    }
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {seconds / found.step.seconds:.0%}" for name, seconds in ranked)
    return Binding(ranked[0][0], f"the step goes to {text}")


def _plain(item: Neighbour) -> dict[str, Any]:
    return {
        "change": item.change,
        "layout": item.layout.dump() if item.layout else None,
        "step_change_percent": None if item.step_change is None else 100 * item.step_change,
        "memory_change_gib": None if item.memory_change is None else item.memory_change / GIB,
        "verdict": item.verdict,
        "reason": item.reason,
    }
