"""Where the time of a run went, over all its sessions (from one start to the stop or the kill that ended it)."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass

import numpy as np

from shardwise.report.results import Record, Results, number

_AFTER_A_SAVE = 10  # steps that a save in the background may slow down


@dataclass(frozen=True)
class Breakdown:
    """Seconds on rank 0. `parts` add up to `wall`."""

    wall: float
    parts: dict[str, float]
    saves: int
    slower_after_saves: float  # seconds by which the steps after a save were slower than the median step; not a part
    killed: int  # sessions that never said that they stopped


def breakdown(results: Results) -> Breakdown:
    """Split the wall-clock time. What a killed session did after its last save is in no journal, so not counted."""
    events, steps = results.events, results.steps
    seconds = np.nan_to_num(steps["step_seconds"])
    waiting = float(np.sum(seconds * np.nan_to_num(steps["data_wait_fraction"])))

    def spent(*kinds: str) -> float:
        return sum(number(event, "seconds") or 0.0 for event in events if event.get("event") in kinds)

    parts = {
        "compute": float(np.sum(seconds)) - waiting,
        "input wait": waiting,
        "evaluation": spent("evaluation"),
        "saving": spent("save", "stop"),
        "starting": spent("start", "resume"),
    }
    known = sum(parts.values())
    wall = max(sum(_wall(session) for session in sessions(events)), known)
    return Breakdown(
        wall=wall,
        parts={**parts, "other": wall - known},
        saves=sum(event.get("event") == "save" for event in events),
        slower_after_saves=_slower_after_saves(results),
        killed=sum(not any(event.get("event") == "stop" for event in session) for session in sessions(events)),
    )


def sessions(events: list[Record]) -> list[list[Record]]:
    """The events of each session; each begins with a start or a resume."""
    found: list[list[Record]] = []
    for event in events:
        if event.get("event") in ("start", "resume"):
            found.append([])
        if found:
            found[-1].append(event)
    return found


def clock(event: Record) -> datetime.datetime | None:
    """When an event ended; None where it does not say."""
    with contextlib.suppress(ValueError, TypeError):
        time = datetime.datetime.fromisoformat(event["time"])
        return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
    return None


def _wall(session: list[Record]) -> float:
    """From the beginning of a session's first event to the end of its last.

    Every step that still counts lies between them: a killed run goes on from the step of its last save.
    """
    times = [time for event in session if (time := clock(event))]
    if not times:
        return 0.0
    return max(0.0, (times[-1] - times[0]).total_seconds()) + (number(session[0], "seconds") or 0.0)


def _slower_after_saves(results: Results) -> float:
    """Sum of (step - median step) over the ten steps after each save, per session: the true stall beside the wait.

    A save in the background returns at once and still takes memory bandwidth, storage and Python from training.
    """
    step, seconds = results.steps["step"], results.steps["step_seconds"]
    total, forever = 0.0, float("inf")
    parts = sessions(results.events)
    for session, end in zip(parts, [*(after[0]["step"] for after in parts[1:]), forever], strict=False):
        inside = (step > session[0]["step"]) & (step <= end) & np.isfinite(seconds)
        if not inside.any():
            continue
        median = float(np.median(seconds[inside]))
        saved = [event["step"] for event in session if event.get("event") == "save"]
        for first, following in zip(saved, [*saved[1:], forever], strict=False):
            after = inside & (step > first) & (step <= min(first + _AFTER_A_SAVE, following))
            total += float(np.sum(seconds[after] - median))
    return total
