"""A Comparison as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwise.planner.comparison import Comparison, Value, change_percent
from shardwise.report.plan_table import layout_words

_FAR = 3.0  # from this ratio on, a change is a factor and not a percentage

# name of the figure: label, format
_ROWS = {
    "gpus": ("GPUs", ",.0f"),
    "precision": ("precision", ""),
    "step_seconds": ("step s", ".3f"),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "hfu": ("HFU", ".1%"),
    "memory_live_gib": ("memory live GiB", ".1f"),
    "memory_used_gib": ("memory used GiB", ".1f"),
    "verdict": ("verdict", ""),
    "bubble_fraction": ("bubble", ".1%"),
    "exposed_data_seconds": ("exposed data s", ".4f"),
    "exposed_tensor_seconds": ("exposed tensor s", ".4f"),
    "exposed_context_seconds": ("exposed context s", ".4f"),
    "exposed_expert_seconds": ("exposed expert s", ".4f"),
    "hours": ("hours", ",.1f"),
    "gpu_hours": ("GPU-hours", ",.0f"),
    "usd": ("USD", ",.0f"),
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Rows in which neither side has anything are left out; a figure that nobody knows is a dash."""
    for title, candidate in zip(comparison.titles, comparison.candidates, strict=True):
        console.print(f"{title}: {layout_words(candidate.layout)}", markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", *comparison.titles, "change"):
        table.add_column(title, justify="right" if title else "left")
    for name, pair in comparison.figures().items():
        if any(pair):
            label, form = _ROWS[name]
            table.add_row(label, *(_cell(value, form) for value in pair), _change(name, pair))
    console.print(table)
    for note in comparison.notes:
        console.print(note, markup=False, highlight=False)


def _cell(value: Value, form: str) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else format(value, form)


def _change(name: str, pair: tuple[Value, Value]) -> str:
    """Points between shares, percent between all else, a factor where they are far apart."""
    first, second = pair
    if isinstance(first, str) or isinstance(second, str) or first is None or second is None:
        return ""
    if _ROWS[name][1].endswith("%"):
        return f"{100 * (second - first):+.1f} points"
    percent = change_percent(pair)
    if percent is None:
        return ""
    ratio = 1 + percent / 100
    return f"× {ratio:,.3g}" if not 1 / _FAR < ratio < _FAR else f"{percent:+.1f} %"
