"""Where the steps of a trace begin and end."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np

from shardwise.profiling.names import OPTIMIZER, STEP
from shardwise.profiling.trace import ANNOTATION, COMMUNICATION, OPERATOR, Trace

_ALIKE = 0.95  # share of kernels that must repeat a step later
Window = tuple[float, float]


def find_steps(trace: Trace) -> tuple[list[Window], str]:
    """(start, end) of each step in seconds of the trace, ascending and disjoint, and how they were found: annotations
    of steps, optimizer steps, kernels that repeat; else the whole trace is one.

    A step ends when both the host has left it and the device has done what the host asked of it there.
    """
    host = trace.host
    annotated = (host.kind == ANNOTATION) & trace.named(STEP)
    if annotated.any():
        return _settled(trace, host.start[annotated], host.end[annotated]), "annotations of steps"
    updates = ((host.kind == ANNOTATION) | (host.kind == OPERATOR)) & trace.named(OPTIMIZER)
    ends = np.sort(host.end[updates])
    if len(ends) > 1:
        return _settled(trace, ends[:-1], ends[1:]), "from one optimizer step to the next"
    repeated = _by_repetition(trace)
    if repeated:
        return repeated, "kernels that repeat"
    begin = min(trace.device.start.min(initial=np.inf), host.start.min(initial=np.inf))
    return [(float(begin), trace.seconds)], "the whole trace, in which nothing marks a step"


def step_number(name: str) -> int | None:
    """The number at the end of a step's annotation."""
    found = re.search(r"(\d+)$", name)
    return int(found[1]) if found else None


def _settled(trace: Trace, starts: np.ndarray, ends: np.ndarray) -> list[Window]:
    device = trace.device
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    known = ~np.isnan(device.launched)
    by_launch = np.argsort(device.launched[known], kind="stable")
    launched = device.launched[known][by_launch]
    done = np.maximum.accumulate(device.end[known][by_launch]) if len(launched) else np.zeros(0)

    def settled(moment: float) -> float:
        count = int(np.searchsorted(launched, moment, side="left"))
        return max(float(moment), float(done[count - 1])) if count else float(moment)

    windows, last = [], -np.inf
    for start, end in zip(starts, ends, strict=True):
        begin, finish = max(settled(start), last), settled(end)
        if finish > begin:
            windows.append((begin, finish))
            last = finish
    return windows


def _by_repetition(trace: Trace) -> list[Window]:
    """The sequence of kernels that are no communication, in the order in which they start, repeats with the step: the
    kernels that occur least often, but more than once, mark it."""
    device = trace.device
    chosen = np.flatnonzero(device.kind != COMMUNICATION)
    chosen = chosen[np.argsort(device.start[chosen], kind="stable")]
    names, starts = device.name[chosen], device.start[chosen]
    codes, counts = np.unique(names, return_counts=True)
    for count in sorted({int(count) for count in counts if count > 1})[:3]:
        places = np.flatnonzero(names == codes[counts == count][0])
        periods = np.diff(places)
        period = int(np.median(periods))
        if period * 2 > len(names) or period < 2 or (np.abs(periods - period) > 0.02 * period).any():
            continue
        if np.mean(names[:-period] == names[period:]) >= _ALIKE:
            edges = starts[places]
            return [(float(a), float(b)) for a, b in pairwise(edges)]
    return []
