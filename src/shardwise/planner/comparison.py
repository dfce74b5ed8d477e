"""Comparison: two predictions side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.spec import Run
from shardwise.spec.memory import GIB
from shardwise.spec.plan import Candidate

Value = float | str | None


@dataclass(frozen=True)
class Comparison:
    """`runs` and `candidates` in the same order; layouts are resolved. `titles` name the columns."""

    titles: tuple[str, str]
    runs: tuple[Run, Run]
    candidates: tuple[Candidate, Candidate]
    notes: tuple[str, ...] = ()

    def figures(self) -> dict[str, tuple[Value, Value]]:
        """Name, with its unit, to the two values; None where one is unknown."""
        first, second = (_figures(run, item) for run, item in zip(self.runs, self.candidates, strict=True))
        return {name: (first[name], second[name]) for name in first}

    def dump(self) -> dict[str, Any]:
        """Plain types; `null` where something is unknown. `change_percent` where both are numbers and the first is not
        zero."""
        return {
            "columns": list(self.titles),
            "candidates": [item.model_dump(mode="json", by_alias=True) for item in self.candidates],
            "differences": {
                name: {"values": list(pair), "change_percent": change_percent(pair)}
                for name, pair in self.figures().items()
            },
            "notes": list(self.notes),
        }


def change_percent(pair: tuple[Value, Value]) -> float | None:
    """From the first to the second, in percent; None where there is no such figure."""
    first, second = pair
    if isinstance(first, str) or isinstance(second, str) or not first or second is None:
        return None
    return 100 * (second / first - 1)


def _figures(run: Run, item: Candidate) -> dict[str, Value]:
    memory, time, cost = item.memory, item.time, item.cost
    return {
        "gpus": float(run.cluster.gpus),
        "precision": item.precision,
        "step_seconds": time.step_seconds,
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "mfu": time.mfu,
        "hfu": time.hfu,
        "memory_live_gib": memory.live / GIB,
        "memory_used_gib": memory.used[1] / GIB,
        "verdict": item.verdict,
        "bubble_fraction": time.bubble_fraction,
        **{f"exposed_{kind}_seconds": seconds for kind, seconds in time.exposed_seconds.items()},
        "hours": cost.hours,
        "gpu_hours": cost.gpu_hours,
        "usd": cost.usd,
    }
