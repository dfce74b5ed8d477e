"""The top of the page: how the run ended, and its figures."""

from __future__ import annotations

from html import escape

import numpy as np

from shardwise.report.breakdown import breakdown, sessions
from shardwise.report.results import Column, Results, number
from shardwise.report.ticks import duration, short


def status(results: Results) -> str:
    """What ran where, how it ended, and whether the loss was as expected."""
    parts = []
    started = [event for event in results.events if event.get("event") in ("start", "resume")]
    where = [results.name]
    if started:
        last = started[-1]
        where += [f"{last.get('world')} × {last.get('device')}", str(last.get("layout"))]
    parts.append(f"<p class='where'>{escape(' · '.join(where))}</p>")
    parts.append(f"<p class='badges'>{_ending(results)}{_expectation(results)}</p>")
    return "".join(parts)


def _ending(results: Results) -> str:
    if not results.events:
        return ""
    last = results.events[-1]
    if last.get("event") != "stop":
        return _badge("bad", "✕", "running still, or killed")
    reason = str(last.get("reason"))
    if reason == "done":
        return _badge("good", "✓", "done")
    return _badge("bad", "◼", f"ended after step {short(last['step'])}: {reason}")


def _expectation(results: Results) -> str:
    checked = [record["inside"] for record in results.evaluations if isinstance(record.get("inside"), bool)]
    if not checked:
        return ""
    inside = sum(checked)
    word = "inside" if inside == len(checked) else "OUTSIDE"
    shown = inside if inside == len(checked) else len(checked) - inside
    text = f"validation loss {word} its band at {shown} of {len(checked)} evaluations"
    return _badge("good", "✓", text) if inside == len(checked) else _badge("bad", "✕", text)


def _badge(kind: str, sign: str, text: str) -> str:
    return f'<span class="badge {kind}"><b aria-hidden="true">{sign}</b> {escape(text)}</span> '


def figures(results: Results) -> str:
    """The headline figures, as a list of terms."""
    steps = results.steps
    if not len(steps["step"]):
        return "<p>No step was recorded.</p>"
    run = results.run
    done = f"{steps['step'][-1]:,.0f}"
    of = f"of {run.recipe.total_steps:,}" if run and run.recipe.total_steps else ""
    tokens, world = _last(steps["tokens"]), _world(results)
    speed, causal, full = (_median(steps[name]) for name in ("tokens_per_second", "mfu", "mfu_full_attention"))
    evaluation = results.evaluations[-1] if results.evaluations else {}
    validation, bits = number(evaluation, "loss"), number(evaluation, "bits_per_byte")
    memory = _largest(steps["peak_memory_gib"])
    time = breakdown(results)
    items = [
        ("Steps", done, of),
        ("Tokens", short(tokens) if tokens is not None else None, "trained on"),
        ("Training loss", _fixed(_last(steps["loss"]), 4), "nats per token, last step"),
        ("Validation loss", _fixed(validation, 4), _at(evaluation) if evaluation else "never evaluated"),
        ("Bits per byte", _fixed(bits, 4), _bits_note(bits) if evaluation else "never evaluated"),
        (
            "Tokens per second",
            short(speed) if speed is not None else None,
            "median step" + (f"; {short(speed / world)} per rank" if speed is not None and world > 1 else ""),
        ),
        ("MFU, causal", _percent(causal), _mfu_note(causal, "attention counted as masked")),
        ("MFU, full", _percent(full), _mfu_note(full, "attention counted in full")),
        ("Peak memory", f"{memory:.2f} GiB" if memory is not None else None, "rank 0"),
        ("Wall time", duration(time.wall), _sessions(results, time.killed)),
    ]
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value) if value is not None else 'unknown'}</dd><dd>{escape(note)}</dd></div>"
        for name, value, note in items
    )
    return f'<dl class="figures">{cells}</dl>'


def _sessions(results: Results, killed: int) -> str:
    count = len(sessions(results.events))
    return (f"in {count} sessions" if count > 1 else "in one go") + (", without what was lost" if killed else "")


def _at(evaluation: dict[str, object]) -> str:
    return f"nats per token, at step {number(evaluation, 'step') or 0:,.0f}"


def _world(results: Results) -> int:
    worlds = [number(event, "world") for event in results.events]
    return int(next((world for world in reversed(worlds) if world), 1))


def _fixed(value: float | None, decimals: int) -> str | None:
    return None if value is None else f"{value:.{decimals}f}"


def _bits_note(bits: float | None) -> str:
    return "the bytes of its tokens are not known" if bits is None else "of validation text"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _mfu_note(value: float | None, note: str) -> str:
    return "this chip's peak is not known" if value is None else note


def _last(column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(known[-1]) if len(known) else None


def _median(column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(np.median(known)) if len(known) else None


def _largest(column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(known.max()) if len(known) else None
