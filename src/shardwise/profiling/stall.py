"""The longest time that a device stood still for its host, and what the host did meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.profiling.trace import ANNOTATION, Trace
from shardwise.timeline.intervals import Cover, clip

_MOST = 0.5  # of the stall that an entry covers to explain it


@dataclass(frozen=True)
class Stall:
    """seconds: of the one gap. within: the outermost operator and the innermost call that fill most of it; '' where
    nothing was recorded."""

    seconds: float
    within: str


def longest_stall(trace: Trace, gaps: Cover, windows: Sequence[tuple[float, float]]) -> Stall | None:
    """Of the gaps inside the steps; None where there is none."""
    found: tuple[float, float] | None = None
    for window in windows:
        start, end = clip(gaps, *window)
        if len(start):
            index = int(np.argmax(end - start))
            if found is None or end[index] - start[index] > found[1] - found[0]:
                found = float(start[index]), float(end[index])
    return None if found is None else Stall(found[1] - found[0], _within(trace, *found))


def _within(trace: Trace, begin: float, end: float) -> str:
    host = trace.host
    covered = np.minimum(host.end, end) - np.maximum(host.start, begin)
    filling = np.flatnonzero((covered > _MOST * (end - begin)) & (host.kind != ANNOTATION))
    if not len(filling):
        return ""
    lengths = host.end[filling] - host.start[filling]
    outer, inner = (trace.names[host.name[filling[place(lengths)]]] for place in (np.argmax, np.argmin))
    return outer if outer == inner else f"{outer}: {inner}"
