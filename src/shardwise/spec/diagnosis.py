"""Diagnosis: what the profiler concludes, and what would change it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwise.spec.layout import Layout
from shardwise.spec.noun import Noun

Bottleneck = Literal[
    "input",
    "checkpoint",
    "recompilation",
    "synchronisation",
    "host-bound",
    "exposed all_gather",
    "exposed reduce_scatter",
    "exposed tensor",
    "exposed context",
    "exposed expert",
    "bubble",
    "copies",
    "straggler",
    "memory-bound",
    "kernels below roofline",
    "compute",
]
RemedyClass = Literal["modelled", "upper bound", "unknown"]


class Remedy(Noun):
    """One setting to try. `gain_percent`: share of the step time that it saves; 'modelled' is the planner's prediction,
    'upper bound' what the trace shows would be saved if the cause were gone altogether."""

    change: str
    layout: Layout | None = None  # the whole layout that it makes, where it is one
    gain_percent: float | None = None
    memory_gib: float | None = None  # more live memory on the fullest rank
    class_: RemedyClass = Field(default="unknown", alias="class")
    why: str = ""


class Diagnosis(Noun):
    """The one bottleneck of a step: `seconds` of it that could be saved, on `rank`, which the step waits for.

    losses: seconds per step of everything that was weighed, the largest first. 'compute' where nothing is worth 5 %.
    """

    bottleneck: Bottleneck
    rank: int
    step_seconds: float
    seconds: float
    evidence: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()
    losses: dict[str, float] = Field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.seconds / self.step_seconds if self.step_seconds else 0.0
