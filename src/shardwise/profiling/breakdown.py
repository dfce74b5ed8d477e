"""Where one rank's steps went: parts that do not overlap and sum to the step, by exact interval arithmetic.

What the device does counts first: compute, memory-bound work, the optimizer, then communication that none of them
covers (exposed), then copies. What is left is the device's idle time, and its cause is sought on the host: it saved a
checkpoint, waited for input, compiled; it had waited for the device (a synchronisation, after which nothing was
queued); or it had not yet asked for the next kernel (host-bound). An idle device with work queued waits for another
stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.profiling.names import CHECKPOINT, COMPILATION, COMPILED, INPUT, OPTIMIZER, PACKING
from shardwise.profiling.steps import Window
from shardwise.profiling.trace import ATTENTION, COMMUNICATION, COPY, GEMM, MEMORY, WAIT, Trace
from shardwise.timeline.intervals import EMPTY, Cover, clip, intersect, length, subtract, union

PARTS = (
    "compute",
    "memory_bound",
    "optimizer",
    "exposed_communication",
    "copy",
    "checkpoint",
    "input",
    "recompilation",
    "synchronisation",
    "host",
    "idle",
)
_ON_HOST = ("checkpoint", "input", "recompilation")
# Where operators are the work itself, those that fetch input or compile are no compute.
_CPU_ORDER = (*_ON_HOST, *(part for part in PARTS[:-1] if part not in _ON_HOST))
_SYNCHRONISED = 50e-6  # a device that falls dry this long before a waiting call returns was waited for


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step of one rank. `parts` (of PARTS) sum to `seconds`.

    exposed and communication: by Timeline stream, seconds that stick out, and in all; exposed sums to the part.
    by_group: (collective, group) to seconds in all, exposed seconds, number. gemm: of the compute, matrix products.
    packing: of the memory-bound time, what FSDP copies into and out of its buffers. launches: kernels of the step.
    """

    seconds: float
    parts: dict[str, float]
    communication: dict[str, float]
    exposed: dict[str, float]
    by_group: dict[tuple[str, str], tuple[float, float, int]]
    gemm: float
    attention: float
    launches: int
    compilations: int = 0
    packing: float = 0.0

    def share(self, part: str) -> float:
        return self.parts[part] / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class RankParts:
    """One rank's steps. `waited`: of each step's communication, the seconds spent on ranks that came later; None where
    that is not known (one rank alone was traced, or their collectives do not match)."""

    rank: int
    steps: tuple[StepParts, ...]
    how: str  # the steps were found
    waited: tuple[float, ...] | None = field(default=None)

    def mean(self) -> StepParts:
        """The mean step."""
        steps = self.steps
        groups = dict.fromkeys(key for step in steps for key in step.by_group)
        zero = (0.0, 0.0, 0)
        return StepParts(
            _mean(step.seconds for step in steps),
            _means([step.parts for step in steps]),
            _means([step.communication for step in steps]),
            _means([step.exposed for step in steps]),
            {
                key: (
                    _mean(step.by_group.get(key, zero)[0] for step in steps),
                    _mean(step.by_group.get(key, zero)[1] for step in steps),
                    round(_mean(step.by_group.get(key, zero)[2] for step in steps)),
                )
                for key in groups
            },
            _mean(step.gemm for step in steps),
            _mean(step.attention for step in steps),
            round(_mean(step.launches for step in steps)),
            sum(step.compilations for step in steps),
            _mean(step.packing for step in steps),
        )


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: _mean(row.get(key, 0.0) for row in rows) for key in dict.fromkeys(key for row in rows for key in row)}


class Breakdown:
    """What a trace covers, part by part; `step` cuts one window out of it."""

    def __init__(self, trace: Trace):
        device, host = trace.device, trace.host
        self.trace = trace
        optimizer = _launched_in(trace, OPTIMIZER)
        self._packing = self._of((device.kind == MEMORY) & ~optimizer & trace.device_named(PACKING))
        computing = np.isin(device.kind, (GEMM, ATTENTION, MEMORY))
        self._gemm = self._of((device.kind == GEMM) & ~optimizer)
        self._attention = self._of((device.kind == ATTENTION) & ~optimizer)
        covers: dict[str, Cover] = {
            "compute": union(
                np.concatenate([self._gemm[0], self._attention[0]]), np.concatenate([self._gemm[1], self._attention[1]])
            ),
            "memory_bound": self._of((device.kind == MEMORY) & ~optimizer),
            "optimizer": self._of(computing & optimizer),
        }
        self.computing = self._of(computing)
        streams = dict.fromkeys(traffic.stream for traffic in trace.traffics)
        communicating = device.kind == COMMUNICATION
        of_traffic = [traffic.stream for traffic in trace.traffics]
        self._streams = {
            stream: self._of(communicating & np.isin(device.traffic, _places(of_traffic, stream))) for stream in streams
        }
        self._groups: dict[tuple[str, str], Cover] = {
            (traffic.collective, traffic.group): self._of(communicating & (device.traffic == index))
            for index, traffic in enumerate(trace.traffics)
        }
        covers["exposed_communication"] = self._of(communicating)
        covers["copy"] = self._of(device.kind == COPY)
        busy = self._of(np.ones(len(device.start), dtype=bool))
        annotations = {
            name: union(host.start[trace.named(pattern)], host.end[trace.named(pattern)])
            for name, pattern in (("checkpoint", CHECKPOINT), ("input", INPUT), ("recompilation", COMPILATION))
        }
        self._covers = {**covers, **annotations, **_late(trace, busy)}
        each = trace.named(COMPILED)  # a compilation's parts are annotated, too
        self._compiled = host.start[each] if each.any() else annotations["recompilation"][0]

    def step(self, window: Window) -> StepParts:
        """The parts of one window."""
        left: Cover = (np.array([window[0]]), np.array([window[1]]))
        parts: dict[str, float] = {}
        for name in _CPU_ORDER if self.trace.on_cpu else PARTS[:-1]:
            taken = intersect(left, clip(self._covers[name], *window))
            parts[name] = length(taken)
            left = subtract(left, taken)
        parts["idle"] = length(left)
        parts = {name: parts[name] for name in PARTS}
        computing = clip(self.computing, *window)
        inside = {stream: clip(cover, *window) for stream, cover in self._streams.items()}
        exposed, shown = {}, EMPTY
        for stream, cover in inside.items():  # what two kinds expose at once counts for the first
            alone = subtract(subtract(cover, computing), shown)
            exposed[stream] = length(alone)
            shown = _join(shown, alone)
        device = self.trace.device
        started = (device.start >= window[0]) & (device.start < window[1])
        counts = np.bincount(device.traffic[started] + 1, minlength=len(self._groups) + 1)[1:]
        groups = {}
        for (key, whole), count in zip(self._groups.items(), counts, strict=True):
            cover = clip(whole, *window)
            if len(cover[0]):
                groups[key] = length(cover), length(subtract(cover, computing)), int(count)
        return StepParts(
            window[1] - window[0],
            parts,
            {stream: length(cover) for stream, cover in inside.items()},
            exposed,
            groups,
            length(clip(self._gemm, *window)),
            length(clip(self._attention, *window)),
            int(started.sum()),
            int(((self._compiled >= window[0]) & (self._compiled < window[1])).sum()),
            min(parts["memory_bound"], length(clip(self._packing, *window))),
        )

    @property
    def host_gaps(self) -> Cover:
        """Where the device waits for the host, whatever the host does."""
        return _join(self._covers["synchronisation"], self._covers["host"])

    def _of(self, mask: np.ndarray) -> Cover:
        return union(self.trace.device.start[mask], self.trace.device.end[mask])


def _places(items: list[str], wanted: str) -> list[int]:
    return [index for index, item in enumerate(items) if item == wanted]


def _join(a: Cover, b: Cover) -> Cover:
    return union(np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]]))


def _launched_in(trace: Trace, pattern: str) -> np.ndarray:
    """Which device entries the host asked for inside an annotation; without the time of launch, none."""
    device, host = trace.device, trace.host
    found = trace.named(pattern)
    start, end = union(host.start[found], host.end[found])
    if not len(start):
        return np.zeros(len(device.start), dtype=bool)
    place = np.searchsorted(start, device.launched, side="right") - 1  # NaN sorts last
    return (place >= 0) & (device.launched <= end[np.maximum(place, 0)])


def _late(trace: Trace, busy: Cover) -> dict[str, Cover]:
    """The device's idle stretches in which the host had not asked for the next kernel when they began: those that
    began while it waited for the device, and the others. On a CPU the host is the device, so all are its own."""
    device, host = trace.device, trace.host
    gap_start, gap_end = np.append(0.0, busy[1]), np.append(busy[0], trace.seconds)
    real = gap_end > gap_start
    gap_start, gap_end = gap_start[real], gap_end[real]
    if trace.on_cpu:
        return {"synchronisation": EMPTY, "host": (gap_start, gap_end)}
    order = np.argsort(device.start, kind="stable")
    starts, launched = device.start[order], device.launched[order]
    following = np.searchsorted(starts, gap_end, side="left")
    inside = following < len(starts)
    asked = np.where(inside, launched[np.minimum(following, max(0, len(starts) - 1))], np.inf) if len(starts) else None
    if asked is None:
        return {"synchronisation": EMPTY, "host": (gap_start, gap_end)}
    late = np.isnan(asked) | (asked > gap_start)  # not recorded: most likely the host's
    waits = host.kind == WAIT
    start, end = union(host.start[waits], host.end[waits])
    synchronised = np.zeros(len(gap_start), dtype=bool)
    if len(start):
        place = np.searchsorted(start, gap_start, side="right") - 1
        synchronised = late & (place >= 0) & (gap_start <= end[np.maximum(place, 0)] + _SYNCHRONISED)
    other = late & ~synchronised
    return {
        "synchronisation": (gap_start[synchronised], gap_end[synchronised]),
        "host": (gap_start[other], gap_end[other]),
    }
