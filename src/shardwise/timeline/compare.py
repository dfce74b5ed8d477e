"""Two timelines of the same step, stream by stream."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.timeline.spans import STREAMS, Timeline


class StreamChange(NamedTuple):
    """Seconds of one stream: busy, and exposed, in the first timeline and in the second."""

    stream: str
    busy: tuple[float, float]
    exposed: tuple[float, float]


def compare_timelines(first: Timeline, second: Timeline) -> tuple[StreamChange, ...]:
    """Every stream that either has, in the order of STREAMS. Compute is never exposed."""
    return tuple(
        StreamChange(
            stream,
            (first.busy(stream), second.busy(stream)),
            (first.exposed(stream), second.exposed(stream)),
        )
        for stream in STREAMS
        if stream in first.streams or stream in second.streams
    )
