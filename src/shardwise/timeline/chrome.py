"""A Timeline in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open.

Format: "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): complete events
have `ph: X`, a start `ts` and a duration `dur` in microseconds; `ph: M` names processes and threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.timeline.spans import STREAMS, Timeline


def to_chrome(timelines: Timeline | Iterable[Timeline], labels: Sequence[str] = ()) -> dict[str, Any]:
    """The document, for `json.dump`. A rank becomes a process, a stream a thread.

    labels: one per timeline, such as 'predicted'; then each timeline is a process of its own, in their order."""
    events: list[dict[str, Any]] = []
    for place, timeline in enumerate([timelines] if isinstance(timelines, Timeline) else timelines):
        rank = place if labels else timeline.rank
        name = f"rank {timeline.rank}" + (f", {labels[place]}" if labels else "")
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        if labels:
            events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for stream in timeline.streams:
            thread = {"pid": rank, "tid": STREAMS.index(stream)}
            events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": stream}})
            events.append({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": thread["tid"]}})
        for span in timeline:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.stream,
                    "pid": rank,
                    "tid": STREAMS.index(span.stream),
                    "ts": span.start * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
