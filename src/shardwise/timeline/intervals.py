"""Sets of time, as disjoint ascending intervals: what covers what, exactly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Cover = tuple[Seconds, Seconds]  # starts and ends of disjoint intervals, ascending

EMPTY: Cover = (np.zeros(0), np.zeros(0))


def union(start: Seconds, end: Seconds) -> Cover:
    """Whatever at least one of the intervals covers. They may overlap and stand in any order; empty ones count for
    nothing."""
    real = end > start
    if not real.all():
        start, end = start[real], end[real]
    if not len(start):
        return EMPTY
    by_start = np.argsort(start, kind="stable")
    start, reach = start[by_start], np.maximum.accumulate(end[by_start])
    first = np.append(True, start[1:] > reach[:-1])
    last = np.append(first[1:], True)
    return start[first], reach[last]


def intersect(a: Cover, b: Cover) -> Cover:
    """Both are disjoint and ascending, so a stretch is in both where two are open."""
    time = np.concatenate([a[0], b[0], a[1], b[1]])
    step = np.repeat([1, 1, -1, -1], [len(a[0]), len(b[0]), len(a[1]), len(b[1])])
    order = np.lexsort((step, time))  # ends before starts at the same moment
    time, depth = time[order], np.cumsum(step[order])
    both = depth[:-1] == 2
    return time[:-1][both], time[1:][both]


def subtract(a: Cover, b: Cover) -> Cover:
    """What is in `a` and not in `b`."""
    if not len(a[0]) or not len(b[0]):
        return a
    low, high = min(a[0][0], b[0][0]) - 1.0, max(a[1][-1], b[1][-1]) + 1.0
    start, end = intersect(a, (np.append(low, b[1]), np.append(b[0], high)))
    real = end > start
    return start[real], end[real]


def clip(cover: Cover, start: float, end: float) -> Cover:
    """What of it lies between two moments."""
    first, last = np.searchsorted(cover[1], start, side="right"), np.searchsorted(cover[0], end, side="left")
    if last <= first:
        return EMPTY
    return np.maximum(cover[0][first:last], start), np.minimum(cover[1][first:last], end)


def length(cover: Cover) -> float:
    """Seconds covered."""
    return float((cover[1] - cover[0]).sum())
