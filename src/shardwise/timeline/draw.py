"""A Timeline as a few lines of text."""

from __future__ import annotations

import numpy as np

from shardwise.timeline.spans import Timeline, shares

_LEVELS = " ░▒▓█"


def draw(timeline: Timeline, width: int = 100) -> str:
    """One line per stream that has spans: its name, `width` cells shaded by how much of each is busy, seconds busy,
    and seconds exposed where that is communication. The last line is the axis."""
    if timeline.seconds <= 0:
        return "an empty timeline"
    edges = np.linspace(0.0, timeline.seconds, width + 1)
    scale, unit = (1.0, "s") if timeline.seconds >= 1 else (1e3, "ms")
    label = max(len(stream) for stream in (*timeline.streams, "compute"))
    lines = []
    for stream in timeline.streams:
        # Anything at all shows: a cell is empty only where the stream is idle throughout it.
        levels = np.ceil(shares(timeline.covered(stream), edges) * (len(_LEVELS) - 1) - 1e-6).astype(int)
        cells = "".join(_LEVELS[level] for level in np.clip(levels, 0, len(_LEVELS) - 1))
        text = f"{stream:<{label}} │{cells}│ {timeline.busy(stream) * scale:9.3f} {unit}"
        if stream not in ("compute", "idle"):
            text += f", {timeline.exposed(stream) * scale:.3f} exposed"
        lines.append(text)
    end = f"{timeline.seconds * scale:.3f} {unit}"
    lines.append(f"{'':<{label}} └{'0':<{width - len(end)}}{end}┘")
    return "\n".join(lines)
