"""What one rank does over one step, as spans on named streams. The planner predicts one, the profiler measures one."""

from shardwise.timeline.chrome import to_chrome
from shardwise.timeline.compare import StreamChange, compare_timelines
from shardwise.timeline.draw import draw
from shardwise.timeline.picture import Box, schedule_svg
from shardwise.timeline.spans import STREAMS, Span, Timeline

__all__ = [
    "STREAMS",
    "Box",
    "Span",
    "StreamChange",
    "Timeline",
    "compare_timelines",
    "draw",
    "schedule_svg",
    "to_chrome",
]
