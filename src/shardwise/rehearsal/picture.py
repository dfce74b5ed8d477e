"""Live bytes over the events of a step, as an SVG file."""

from __future__ import annotations

from html import escape

from shardwise.rehearsal.ledger import Ledger, part_of
from shardwise.spec.memory import GIB, PARTS

_COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#e45756",
    "optimizer": "#72b7b2",
    "gathered": "#f2b447",
    "activations": "#59a14f",
    "logits": "#b279a2",
    "transient": "#9d755d",
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _COLUMNS = 1000, 420, 60, 40, 900


def memory_svg(ledger: Ledger, title: str) -> str:
    """Stacked areas, one for each part; a line where the peak is. The horizontal axis counts allocations and releases.
    Of the events that share a column the one with most bytes is drawn."""
    columns = _columns(ledger)
    top = max((sum(column.values()) for _, column in columns), default=1) or 1
    wide, high = _WIDTH - _LEFT - 10, _HEIGHT - _TOP - 60
    step = wide / max(1, len(columns) - 1)

    def y(size: float) -> str:
        return f"{_TOP + high * (1 - size / top):.1f}"

    areas, below = [], [0] * len(columns)
    for part in PARTS:
        above = [base + column[part] for base, (_, column) in zip(below, columns, strict=True)]
        if above != below:
            upper = " ".join(f"{_LEFT + i * step:.1f},{y(size)}" for i, size in enumerate(above))
            lower = " ".join(f"{_LEFT + i * step:.1f},{y(below[i])}" for i in reversed(range(len(columns))))
            areas.append(f'<polygon points="{upper} {lower}" fill="{_COLOURS[part]}"><title>{part}</title></polygon>')
        below = above
    peak = max(range(len(columns)), key=below.__getitem__, default=0)
    ticks = [
        f'<text x="{_LEFT - 6}" y="{float(y(top * share)) + 3:.1f}" text-anchor="end">{top * share / GIB:.3g}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    legend = [
        f'<rect x="{_LEFT + 130 * i}" y="{_HEIGHT - 34}" width="10" height="10" fill="{_COLOURS[part]}"/>'
        f'<text x="{_LEFT + 130 * i + 14}" y="{_HEIGHT - 25}">{part}</text>'
        for i, part in enumerate(PARTS)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-family="sans-serif" font-size="11">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            f'<text x="4" y="18" font-size="13">{escape(title)}</text>',
            f'<text x="4" y="34">GiB</text><text x="{_WIDTH - 10}" y="{_HEIGHT - 46}" text-anchor="end">'
            "allocations and releases of one step</text>",
            *areas,
            f'<line x1="{_LEFT + peak * step:.1f}" x2="{_LEFT + peak * step:.1f}" y1="{_TOP}" '
            f'y2="{_TOP + high}" stroke="#222222" stroke-dasharray="3 3"/>',
            *ticks,
            *legend,
            "</svg>\n",
        ]
    )


def _columns(ledger: Ledger) -> list[tuple[int, dict[str, int]]]:
    """(event, bytes by part) of at most _COLUMNS events, in order."""
    events = range(ledger.start, len(ledger.sizes))
    width = max(1, -(-len(events) // _COLUMNS))
    wanted = {
        max(range(first, min(first + width, events.stop)), key=ledger.sizes.__getitem__)
        for first in range(events.start, events.stop, width)
    }
    now: dict[str, int] = dict.fromkeys(PARTS, 0)
    columns = []
    for event, (number, allocated) in enumerate(ledger.events):
        block = ledger.blocks[number]
        if block.kind != "host":
            now[part_of(block)] += block.size if allocated else -block.size
        if event in wanted:
            columns.append((event, dict(now)))
    return columns
