"""Plan, Candidate: the planner's ranked answers, and why each stands where it does."""

from __future__ import annotations

import datetime
from typing import Any, Literal

from shardwise.spec.layout import Layout
from shardwise.spec.memory import Memory
from shardwise.spec.noun import Noun
from shardwise.spec.run import Run

Verdict = Literal["fits", "tight", "oom", "unknown"]  # unknown: nobody said how much memory the chip has


class PredictedTime(Noun):
    """One step, as predicted. `exposed_seconds`: what communication adds to it, by kind. The classes say whether
    `calibrate` measured what compute, and what exchanges within a domain, are computed from."""

    step_seconds: float
    tokens_per_second_per_gpu: float
    mfu: float  # attention counted causal
    hfu: float  # with recomputed work
    bubble_fraction: float
    exposed_seconds: dict[str, float]
    compute_class: Literal["modelled", "calibrated"] = "modelled"
    communication_class: Literal["modelled", "measured"] = "modelled"


class Cost(Noun):
    """What the whole run takes. Unknown where no tokens are given, or no price is known."""

    gpu_hours: float | None = None
    hours: float | None = None
    usd: float | None = None
    price_usd_per_gpu_hour: float | None = None
    price_date: datetime.date | None = None
    provider: str | None = None


class Candidate(Noun):
    """One layout in one precision, with its predictions. `precision` is its name in a Run file."""

    layout: Layout
    precision: str
    verdict: Verdict
    memory: Memory
    time: PredictedTime
    cost: Cost
    why: tuple[str, ...]


class ClusterSize(Noun):
    """The best layout at one number of chips; `scaling_efficiency` is its tokens/s per GPU over that of the smallest
    size that fits, `on_frontier` says that no other size is both faster and cheaper."""

    gpus: int
    gpu: str
    best: Candidate
    scaling_efficiency: float = 1.0
    on_frontier: bool = True


class Plan(Noun):
    """The best candidate first. `run` is a Run file that trains it."""

    candidates: tuple[Candidate, ...]
    rejected: dict[str, int]
    searched: int
    seconds: float
    run: Run
    notes: tuple[str, ...] = ()

    def dump(self) -> dict[str, Any]:
        """Plain types; `null` where something is unknown."""
        return self.model_dump(mode="json", by_alias=True)
