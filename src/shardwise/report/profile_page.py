"""A Profile as one offline page, and as tracks for ui.perfetto.dev."""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from shardwise.report.page import POLICY
from shardwise.report.profile_text import LABELS, diagnosis_lines, profile_lines, remedy_line, time
from shardwise.timeline import Timeline, to_chrome

if TYPE_CHECKING:
    from shardwise.profiling.profile import Profile

_COLOURS = {
    "compute": "#59a14f",
    "memory_bound": "#8cd17d",
    "optimizer": "#4c78a8",
    "exposed_communication": "#e15759",
    "copy": "#b07aa1",
    "checkpoint": "#9c755f",
    "input": "#f28e2b",
    "recompilation": "#edc948",
    "synchronisation": "#ff9da7",
    "host": "#bab0ac",
    "idle": "#dddddd",
}
_WIDTH, _ROW, _LEFT, _MOST_BOXES = 1100, 20, 110, 4000


def chrome_document(profile: Profile) -> dict[str, Any]:
    """Trace Event Format: the predicted step, and each rank's measured one, as processes one below the other."""
    timelines, labels = list(profile.timelines), ["measured"] * len(profile.timelines)
    if profile.predicted is not None:
        timelines.insert(0, profile.predicted)
        labels.insert(0, "predicted")
    return to_chrome(timelines, labels)


def render_profile(profile: Profile) -> str:
    """The page: diagnosis, a bar of the step's parts per rank, tracks, and all figures as text."""
    diagnosis = profile.diagnosis
    title = f"{diagnosis.bottleneck}: {diagnosis.share:.0%} of the step"
    name = profile.run.model.name if profile.run else "profile"
    tried = "".join(f"<li>{escape(remedy_line(item))}</li>" for item in diagnosis.remedies)
    said = "".join(f"<li>{escape(line)}</li>" for line in diagnosis.evidence)
    tracks = [(f"rank {item.rank}, measured", item) for item in profile.timelines[:8]]
    if profile.predicted is not None:
        tracks.insert(0, (f"rank {profile.predicted.rank}, predicted", profile.predicted))
    longest = max(item.seconds for _, item in tracks)
    sections = [
        f"<section><h2>{escape(diagnosis_lines(diagnosis)[0])}</h2><ul>{said}</ul>"
        + (f"<h3>What to try</h3><ol>{tried}</ol>" if tried else "")
        + "</section>",
        f'<section><h2>The mean step of each rank</h2><div class="wide">{_bars(profile)}</div></section>',
        "<section><h2>One step</h2>"
        + "".join(
            f'<h3>{escape(label)}: {time(item.seconds)}</h3><div class="wide">{_tracks(item, longest)}</div>'
            for label, item in tracks
        )
        + "</section>",
        f"<section><h2>Figures</h2><pre>{escape(chr(10).join(profile_lines(profile)))}</pre></section>",
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{escape(name)}: {escape(title)}</title>",
            f"<style>{resources.files(__package__).joinpath('page.css').read_text()}"
            "svg{min-width:50rem;width:100%;background:#fff}.wide{overflow-x:auto}pre{white-space:pre;overflow-x:auto}"
            "</style></head><body>",
            f"<header><h1>{escape(name)}</h1><p>{escape(title)}</p></header><main>",
            *sections,
            "</main><footer>Made by shardwise profile.</footer></body></html>\n",
        ]
    )


def _bars(profile: Profile) -> str:
    longest = max(rank.mean().seconds for rank in profile.ranks)
    height = 24 * len(profile.ranks) + 24 * 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="11"><title>Parts of the step, by rank</title>'
    ]
    for row, rank in enumerate(profile.ranks):
        mean, left = rank.mean(), float(_LEFT)
        parts.append(f'<text x="4" y="{row * 24 + 15}">rank {rank.rank}</text>')
        for part, seconds in mean.parts.items():
            wide = seconds / longest * (_WIDTH - _LEFT - 8)
            if wide > 0.2:
                parts.append(
                    f'<rect x="{left:.1f}" y="{row * 24}" width="{wide:.1f}" height="20" fill="{_COLOURS[part]}">'
                    f"<title>{escape(LABELS[part])}: {time(seconds)}</title></rect>"
                )
            left += wide
    left, top = 4, 24 * len(profile.ranks) + 6
    for part, colour in _COLOURS.items():
        if left > _WIDTH - 180:
            left, top = 4, top + 20
        parts.append(f'<rect x="{left}" y="{top}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 14}" y="{top + 9}">{escape(LABELS[part])}</text>')
        left += 24 + 6 * len(LABELS[part])
    return "".join([*parts, "</svg>"])


def _tracks(timeline: Timeline, longest: float) -> str:
    """One row per stream; where there are too many stretches to see, the longest are drawn."""
    streams = timeline.streams
    scale = (_WIDTH - _LEFT - 8) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_ROW * len(streams)}" role="img" '
        'font-family="sans-serif" font-size="11"><title>Streams of one step</title>'
    ]
    for row, stream in enumerate(streams):
        colour = {"compute": "#59a14f", "idle": "#dddddd", "input": "#f28e2b", "copy": "#b07aa1"}.get(stream, "#e15759")
        parts.append(f'<text x="4" y="{row * _ROW + 13}">{stream}</text>')
        start, end = timeline.covered(stream)
        shown = sorted(range(len(start)), key=lambda index: start[index] - end[index])[:_MOST_BOXES]
        boxes = "".join(
            f"M{_LEFT + start[index] * scale:.1f} {row * _ROW + 2}h{max((end[index] - start[index]) * scale, 0.1):.1f}v"
            f"{_ROW - 4}H{_LEFT + start[index] * scale:.1f}z"
            for index in sorted(shown)
        )
        parts.append(f'<path d="{boxes}" style="fill:{colour};stroke:none"/>')  # a page's style would win over fill=
    return "".join([*parts, "</svg>"])
