"""A pipeline schedule as a picture: one row per rank, one box per action."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

# Forward, whole backward, gradient of the input alone, gradient of the weights alone
KINDS = {
    "F": ("#4c78a8", "forward"),
    "B": ("#59a14f", "backward"),
    "I": ("#4fb3bf", "backward, input gradient"),
    "W": ("#f2b447", "backward, weight gradient"),
}
_ROW, _GAP, _LEFT, _TOP, _FONT = 22, 4, 56, 26, 10


class Box(NamedTuple):
    """One action: its kind (F, B, I, W), micro-batch, which of its rank's stages (0, 1), start and end in seconds."""

    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float


def schedule_svg(rows: Sequence[Sequence[Box]], *, title: str = "", width: int | None = None) -> str:
    """An SVG element to stand by itself or inside HTML. Row r is pipeline rank r. A rank's later stages are paler. The
    number of a micro-batch is written where its box has room; `width` is by default enough for most of them, up to
    4,000. Raises ValueError where there is nothing to draw."""
    seconds = max((box.end for row in rows for box in row), default=0.0)
    if seconds <= 0:
        raise ValueError("a schedule without actions cannot be drawn")
    width = width or min(4000, max(900, 18 * max(len(row) for row in rows)))
    scale = (width - _LEFT - 8) / seconds
    height = _TOP + len(rows) * (_ROW + _GAP) + 24
    text = f'font-family="sans-serif" font-size="{_FONT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" {text}>',
        f"<title>{escape(title or 'pipeline schedule')}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="4" y="16" font-size="12">{escape(title)}</text>',
    ]
    for rank, row in enumerate(rows):
        top = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text x="4" y="{top + 15}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{seconds * scale:.2f}" height="{_ROW}" fill="#eeeeee"/>')
        parts += [_box(box, top, scale) for box in row]
    return "\n".join([*parts, *_legend(rows, height), "</svg>"]) + "\n"


def _box(box: Box, top: float, scale: float) -> str:
    left, wide = _LEFT + box.start * scale, (box.end - box.start) * scale
    fill, name = KINDS[box.kind]
    opacity = max(0.4, 1 - 0.2 * box.chunk)
    label = str(box.micro_batch)
    drawn = (
        f'<rect x="{left:.2f}" y="{top}" width="{max(wide, 0.1):.2f}" height="{_ROW}" fill="{fill}" '
        f'fill-opacity="{opacity:.2f}" stroke="#ffffff" stroke-width="{0.5 if wide > 3 else 0}">'
        f"<title>{name} of micro-batch {label}, stage {box.chunk} of the rank</title></rect>"
    )
    if wide >= 0.7 * _FONT * len(label) + 2:
        drawn += f'<text x="{left + wide / 2:.2f}" y="{top + 15}" text-anchor="middle">{label}</text>'
    return drawn


def _legend(rows: Sequence[Sequence[Box]], height: int) -> list[str]:
    parts, left = [], _LEFT
    present = {box.kind for row in rows for box in row}
    for fill, name in (KINDS[kind] for kind in KINDS if kind in present):
        parts.append(f'<rect x="{left}" y="{height - 16}" width="10" height="10" fill="{fill}"/>')
        parts.append(f'<text x="{left + 14}" y="{height - 7}">{name}</text>')
        left += 34 + 6 * len(name)
    return parts
