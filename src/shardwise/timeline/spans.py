"""Timeline: spans in numpy columns, and what they cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.timeline.intervals import Cover, Seconds, intersect, length, union

STREAMS = (
    "compute",
    "all_gather",
    "reduce_scatter",
    "tensor",
    "context",
    "pipeline",
    "expert",
    "copy",
    "input",
    "idle",
)
_CODES = {name: code for code, name in enumerate(STREAMS)}


class Span(NamedTuple):
    """Something that runs on a stream from `start` to `end`, in seconds since the step began."""

    stream: str
    start: float
    end: float
    name: str


@dataclass(frozen=True, eq=False)
class Timeline:
    """One rank over one step of `seconds`. Columns of equal length, one entry per span.

    stream: code, an index into STREAMS. start, end: seconds since the step began. name: index into `names`.
    Spans of one stream may overlap; what overlaps counts once.
    """

    stream: npt.NDArray[np.int8]
    start: Seconds
    end: Seconds
    name: npt.NDArray[np.int32]
    names: tuple[str, ...]
    seconds: float
    rank: int = 0

    @classmethod
    def build(cls, spans: Iterable[Span], *, seconds: float | None = None, rank: int = 0) -> Timeline:
        """`seconds`: of the step, by default until the last span's end. Raises ValueError for an unknown stream, or a
        span that ends before it starts or lies outside the step."""
        names: dict[str, int] = {}
        rows = []
        for span in spans:
            if span.stream not in _CODES:
                raise ValueError(f"unknown stream '{span.stream}'. Known: {', '.join(STREAMS)}")
            rows.append((_CODES[span.stream], span.start, span.end, names.setdefault(span.name, len(names))))
        columns = np.array(rows, dtype=np.float64).reshape(len(rows), 4)
        start, end = columns[:, 1].copy(), columns[:, 2].copy()
        last = float(end.max(initial=0.0))
        seconds = last if seconds is None else seconds
        # 1e-9 of a step: sums of durations may differ in their last digits.
        if bool((end < start).any()) or float(start.min(initial=0.0)) < 0 or last > seconds * (1 + 1e-9):
            raise ValueError("a span ends before it starts, or lies outside the step")
        return cls(
            columns[:, 0].astype(np.int8), start, end, columns[:, 3].astype(np.int32), tuple(names), seconds, rank
        )

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Any:
        for code, start, end, name in zip(self.stream, self.start, self.end, self.name, strict=True):
            yield Span(STREAMS[code], float(start), float(end), self.names[name])

    @property
    def streams(self) -> tuple[str, ...]:
        """Those that have spans, in the order of STREAMS."""
        present = set(self.stream.tolist())
        return tuple(name for code, name in enumerate(STREAMS) if code in present)

    def covered(self, *streams: str) -> Cover:
        """Disjoint intervals in which at least one of the streams runs."""
        codes = [_CODES[stream] for stream in streams]
        chosen = np.isin(self.stream, codes) & (self.end > self.start)
        return union(self.start[chosen], self.end[chosen])

    def busy(self, stream: str) -> float:
        """Seconds in which the stream has a span."""
        return length(self.covered(stream))

    def idle(self, stream: str) -> float:
        """Seconds of the step in which it has none."""
        return self.seconds - self.busy(stream)

    def exposed(self, stream: str) -> float:
        """Seconds in which the stream runs and compute does not."""
        return self.busy(stream) - length(intersect(self.covered(stream), self.covered("compute")))

    def with_idle(self, name: str = "idle") -> Timeline:
        """A copy whose `idle` stream also holds every stretch of the step in which nothing else runs."""
        start, end = self.covered(*(stream for stream in STREAMS if stream != "idle"))
        gaps_start, gaps_end = np.append(0.0, end), np.append(start, self.seconds)
        real = gaps_end - gaps_start > 1e-12 * self.seconds
        gaps = zip(gaps_start[real], gaps_end[real], strict=True)
        spans = [*self, *(Span("idle", float(begin), float(finish), name) for begin, finish in gaps)]
        return Timeline.build(spans, seconds=self.seconds, rank=self.rank)


def shares(cover: Cover, edges: Sequence[float] | Seconds) -> Seconds:
    """Of each bin between two neighbouring edges, the share that the intervals cover: shape (len(edges) - 1,)."""
    start, end = cover
    edges = np.asarray(edges, dtype=np.float64)
    if not len(start):
        return np.zeros(len(edges) - 1)
    before = np.append(0.0, np.cumsum(end - start))  # covered until each interval's start
    index = np.searchsorted(start, edges, side="right") - 1
    inside = np.clip(edges - start[np.maximum(index, 0)], 0.0, (end - start)[np.maximum(index, 0)])
    until = np.where(index >= 0, before[np.maximum(index, 0)] + inside, 0.0)
    return np.asarray(np.diff(until) / np.diff(edges))
