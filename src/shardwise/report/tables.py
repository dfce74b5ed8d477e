"""The page's tables: where the time went, the evaluations, what happened when."""

from __future__ import annotations

from html import escape

from shardwise.report.breakdown import breakdown, clock
from shardwise.report.results import Record, Results, number
from shardwise.report.ticks import duration, short

_OPEN_ROWS = 12  # a longer table of evaluations starts closed


def time_table(results: Results) -> str:
    """A stacked bar, and the same as a table."""
    time = breakdown(results)
    if not time.wall:
        return ""
    parts = [(name, seconds, seconds / time.wall) for name, seconds in time.parts.items()]
    words = ", ".join(f"{name} {share:.1%}" for name, _, share in parts)
    bar = "".join(
        f'<i class="{_style(name)}" style="width:{share * 100:.2f}%"></i>' for name, _, share in parts if share > 0.0005
    )
    rows = "".join(
        f'<tr><th scope="row"><i class="key {_style(name)}"></i>{name}</th>'
        f"<td>{duration(seconds)}</td><td>{share:.1%}</td></tr>"
        for name, seconds, share in parts
    )
    notes = []
    if time.saves:
        slower = (
            f"the ten steps after each were {duration(time.slower_after_saves)} slower in all than the median step"
            if time.slower_after_saves >= 0.005
            else "the steps after them were no slower than others"
        )
        saves = "1 save" if time.saves == 1 else f"{time.saves} saves"
        waited = duration(time.parts["saving"] / time.saves)
        notes.append(f"Training waited {waited} for each of {saves} on average; {slower}.")
    if time.killed:
        notes.append(
            f"{time.killed} session{'s' * (time.killed > 1)} ended without a word (killed, or running still): what "
            "came after the last checkpoint is not counted."
        )
    return (
        f'<div class="bar" role="img" aria-label="Where the time went: {escape(words)}">{bar}</div>'
        f'<table class="time"><thead><tr><th scope="col">part</th><th scope="col">time</th><th scope="col">share</th>'
        f"</tr></thead><tbody>{rows}</tbody></table>" + "".join(f"<p>{escape(note)}</p>" for note in notes)
    )


def _style(name: str) -> str:
    return "part-" + name.replace(" ", "-")


def evaluation_table(results: Results) -> str:
    """Every validation, with its band where one was given."""
    records = results.evaluations
    if not records:
        return ""
    gate = any(isinstance(record.get("inside"), bool) for record in records)
    batch = results.run.recipe.batch_tokens if results.run else None
    losses = ["loss", *dict.fromkeys(key for record in records for key in record if key.startswith("loss/"))]
    columns = ["step", *(["tokens"] if batch else []), *losses, "bits per byte", *(["expected", ""] if gate else [])]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    rows = "".join(_row(record, batch, losses, gate) for record in records)
    table = (
        '<div class="scroll" role="region" aria-label="Evaluations" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    if len(records) <= _OPEN_ROWS:
        return table
    return f"<details><summary>All {len(records)} evaluations</summary>{table}</details>"


def _row(record: Record, batch: int | None, losses: list[str], gate: bool) -> str:
    step = number(record, "step") or 0.0
    cells = [f"{step:,.0f}", *([short(step * batch)] if batch else [])]
    cells += [_decimals(record, key) for key in (*losses, "bits_per_byte")]
    if gate:
        inside = record.get("inside")
        known = isinstance(inside, bool)
        cells.append(f"{_decimals(record, 'expected_loss')} ± {number(record, 'tolerance') or 0:.2g}" if known else "")
        cells.append(("inside" if inside else "<b>OUTSIDE</b>") if known else "not checked")
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _decimals(record: Record, key: str) -> str:
    value = number(record, key)
    return "unknown" if value is None else f"{value:.4f}"


def history(results: Results) -> str:
    """Starts, resumes and stops."""
    lines = []
    for event in results.events:
        time = clock(event)
        when = f"<time>{time:%Y-%m-%d %H:%M:%S} UTC</time> " if time else ""
        step = f"{event['step']:,.0f}"
        match event.get("event"):
            case "start" | "resume" as kind:
                what = "started" if kind == "start" else f"resumed after step {step}"
                what += f" on {event.get('world')} × {event.get('device')}: {event.get('layout')}"
            case "stop":
                reason = event.get("reason")
                what = f"done with step {step}" if reason == "done" else f"ended after step {step}: {reason}"
            case _:
                continue
        lines.append(f"<li>{when}{escape(what)}</li>")
    return f"<ol class='history'>{''.join(lines)}</ol>" if lines else ""
