"""Several ranks of one step: who came late to a collective, and who waited.

A collective ends on all its ranks together and begins when each gets there, so the shortest of its durations is about
what the exchange took, and what another rank's takes longer is its wait for the last to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.profiling.breakdown import RankParts
from shardwise.profiling.steps import Window
from shardwise.profiling.trace import COMMUNICATION, Trace


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for. waited: the mean over the other ranks, seconds per step, that their
    collectives take longer than on the last to come. late: how much more device time than the others' median it has."""

    rank: int
    waited: float
    late: float


def waits(traces: Sequence[Trace], windows: Sequence[Sequence[Window]]) -> list[list[float]] | None:
    """Seconds that each rank waited within communication, per step. None where fewer than two ranks were traced, or
    their collectives do not match in number."""
    steps = min(map(len, windows), default=0)
    if len(traces) < 2 or not steps:
        return None
    result = [[0.0] * steps for _ in traces]
    matched = False
    for step in range(steps):
        by_key: dict[tuple[str, str], list[tuple[int, np.ndarray]]] = {}
        for place, trace in enumerate(traces):
            for key, durations in _durations(trace, windows[place][step]).items():
                by_key.setdefault(key, []).append((place, durations))
        for found in by_key.values():
            if len(found) < 2 or len({len(durations) for _, durations in found}) > 1:
                continue
            matched = True
            shortest = np.min([durations for _, durations in found], axis=0)
            for place, durations in found:
                result[place][step] += float((durations - shortest).sum())
    return result if matched else None


def _durations(trace: Trace, window: Window) -> dict[tuple[str, str], np.ndarray]:
    """Of each kind of collective, in the order in which they begin. Point-to-point traffic has no common end."""
    device = trace.device
    inside = (device.kind == COMMUNICATION) & (device.start >= window[0]) & (device.start < window[1])
    result = {}
    for index, traffic in enumerate(trace.traffics):
        chosen = np.flatnonzero(inside & (device.traffic == index))
        if traffic.collective != "send_recv" and len(chosen):
            chosen = chosen[np.argsort(device.start[chosen], kind="stable")]
            result[traffic.collective, traffic.group] = device.end[chosen] - device.start[chosen]
    return result


def critical(ranks: Sequence[RankParts]) -> RankParts:
    """The rank that the step waits for: it waits least itself; where that is not known, it has the least idle and
    communication time."""
    if all(rank.waited is not None for rank in ranks):
        return min(ranks, key=lambda rank: sum(rank.waited or ()))
    return max(ranks, key=lambda rank: own_seconds(rank))


def own_seconds(rank: RankParts) -> float:
    """Per step, without exposed communication: what the rank itself does, or fails to do."""
    mean = rank.mean()
    return mean.seconds - mean.parts["exposed_communication"] - mean.parts["idle"]


def straggler(ranks: Sequence[RankParts]) -> Straggler | None:
    """None where that is not known."""
    if len(ranks) < 2 or any(rank.waited is None for rank in ranks):
        return None
    last = critical(ranks)
    others = [rank for rank in ranks if rank is not last]
    waited = [sum(rank.waited or ()) / len(rank.waited or (1,)) for rank in others]
    busy = [_device_seconds(rank) for rank in others]
    return Straggler(last.rank, float(np.mean(waited)), _device_seconds(last) - float(np.median(busy)))


def _device_seconds(rank: RankParts) -> float:
    parts = rank.mean().parts
    return parts["compute"] + parts["memory_bound"] + parts["optimizer"]
