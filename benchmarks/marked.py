"""Parts of a page that a benchmark writes anew, between marks that readers do not see."""

from __future__ import annotations

from pathlib import Path

OWN = "\n## Our own trainer\n"  # of docs/accuracy.md, where the part begins that benchmarks.published leaves alone


def write_marked(page: Path, name: str, lines: list[str]) -> None:
    """Replace what stands between the marks of this name, or add it at the end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text, new = page.read_text() if page.exists() else "", "\n".join([begin, *lines, end])
    start, stop = text.find(begin), text.find(end)
    page.write_text(text[:start] + new + text[stop + len(end) :] if 0 <= start < stop else f"{text}\n{new}\n")


def own_part(page: Path) -> str:
    """The part of docs/accuracy.md about our own trainer."""
    text = page.read_text() if page.exists() else ""
    place = text.find(OWN)
    return text[place:] if place >= 0 else ""
