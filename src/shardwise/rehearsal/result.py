"""Rehearsal: what was found on one rank, and what the planner says of the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.spec.memory import GIB, PARTS, Memory


@dataclass(frozen=True)
class Rehearsal:
    """Bytes; `parts` at the peak of the step. reserved: by the allocator, with expandable segments, as the trainer sets
    them, and without. exact, modelled: which figures are which."""

    rank: int
    mesh: str
    device: str
    parts: dict[str, float]
    reserved: float
    reserved_default: float | None
    host: float
    peak_op: str
    peak_module: str
    largest: list[tuple[str, str, str, int]]  # part, operator, module, bytes: of what was alive at the peak
    flops: dict[str, int]
    predicted: Memory
    step_seconds: float | None = None  # of one step of this rank alone, with collectives that do nothing
    predicted_seconds: float | None = None  # the same, by the planner
    exact: list[str] = field(default_factory=list)
    modelled: list[str] = field(default_factory=list)
    seconds: float = 0.0
    pictures: list[str] = field(default_factory=list)

    @property
    def live(self) -> float:
        return sum(self.parts.values())

    def dump(self) -> dict[str, Any]:
        """What `--json` prints. difference_gib: predicted less rehearsed."""
        planned = {part: getattr(self.predicted, part) for part in PARTS}
        return {
            "rank": self.rank,
            "mesh": self.mesh,
            "device": self.device,
            "memory": {
                "live_gib": self.live / GIB,
                "reserved_gib": self.reserved / GIB,
                "reserved_default_segments_gib": None if self.reserved_default is None else self.reserved_default / GIB,
                "host_gib": self.host / GIB,
                "parts_gib": {part: self.parts[part] / GIB for part in PARTS},
                "peak_op": self.peak_op,
                "peak_module": self.peak_module,
                "largest": [
                    {"part": part, "op": operator, "module": module, "gib": size / GIB}
                    for part, operator, module, size in self.largest
                ],
            },
            "time": {
                "compute_seconds": self.step_seconds,
                "tflop": sum(self.flops.values()) / 1e12,
                "tflop_by_op": {name: count / 1e12 for name, count in sorted(self.flops.items())},
            },
            "predicted": {
                "class": self.predicted.class_,
                "event": self.predicted.event,
                "live_gib": self.predicted.live / GIB,
                "reserved_gib": self.predicted.reserved[1] / GIB,
                "parts_gib": {part: size / GIB for part, size in planned.items()},
                "compute_seconds": self.predicted_seconds,
                "difference_gib": {
                    **{part: (size - self.parts[part]) / GIB for part, size in planned.items()},
                    "live": (self.predicted.live - self.live) / GIB,
                },
            },
            "exact": self.exact,
            "modelled": self.modelled,
            "files": self.pictures,
            "seconds": self.seconds,
        }
