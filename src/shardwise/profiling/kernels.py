"""The kernels that take longest, and how near they come to their roofline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.profiling.steps import Window
from shardwise.profiling.trace import COMMUNICATION, COPY, GEMM, KINDS, Trace


@dataclass(frozen=True)
class Kernel:
    """All calls of one name. seconds and calls: per step. roofline: share of what the chip allows, over the calls
    whose shapes were recorded; None where that is not known."""

    name: str
    kind: str
    seconds: float
    calls: float
    roofline: float | None


def slowest_kernels(trace: Trace, windows: Sequence[Window], top: int = 10) -> tuple[Kernel, ...]:
    """By time within the steps; of operators that contain each other (on a CPU) each counts for itself."""
    device, steps = trace.device, max(1, len(windows))
    inside = _inside(trace, windows) & ~np.isin(device.kind, (COMMUNICATION, COPY))
    seconds = (device.end - device.start)[inside]
    names, bounds = device.name[inside], device.bound[inside]
    size = len(trace.names)
    total = np.bincount(names, seconds, size)
    calls = np.bincount(names, minlength=size)
    known = ~np.isnan(bounds)
    least = np.bincount(names[known], bounds[known], size)
    taken = np.bincount(names[known], seconds[known], size)
    kinds = np.zeros(size, dtype=int)
    kinds[device.name] = device.kind
    result = []
    for code in np.argsort(-total)[:top]:
        if total[code] <= 0:
            break
        share = float(least[code] / taken[code]) if taken[code] > 0 else None
        result.append(
            Kernel(short(trace.names[code]), KINDS[kinds[code]], total[code] / steps, calls[code] / steps, share)
        )
    return tuple(result)


def product_roofline(trace: Trace, windows: Sequence[Window]) -> float | None:
    """Of all matrix products together, the share of the chip's roofline that they reach."""
    device = trace.device
    chosen = _inside(trace, windows) & (device.kind == GEMM) & ~np.isnan(device.bound)
    taken = float((device.end - device.start)[chosen].sum())
    return float(device.bound[chosen].sum()) / taken if taken else None


def _inside(trace: Trace, windows: Sequence[Window]) -> np.ndarray:
    device = trace.device
    result = np.zeros(len(device.start), dtype=bool)
    for start, end in windows:
        result |= (device.start >= start) & (device.start < end)
    return result


def short(name: str, width: int = 72) -> str:
    """A kernel's name without return type, template and function arguments."""
    name = name.replace("(anonymous namespace)", "")
    while (inner := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = inner
    name = name.removeprefix("void ").split("<")[0].split("(")[0].replace("::::", "::").strip() or "?"
    return name if len(name) <= width else name[: width - 1] + "…"
