"""Predicted beside measured: RUN_DIR/predictions.jsonl, one line whenever both are known of a Run.

    {"verb", "time", "chip", "run", "predicted": {"class", "step_seconds", "live_gib"},
     "measured": {"class", "step_seconds", "live_gib"}}

What one of them does not know is null.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.planner.search import Found
from shardwise.planner.single import judge
from shardwise.planner.stacks import own_stack
from shardwise.spec import InputError, Run
from shardwise.spec.memory import GIB

PREDICTIONS = "predictions.jsonl"
_WARM_UP = 2  # steps of a session that are not counted: kernels and caches are still being found
_FEWEST = 3  # steps whose median is a measurement


def predicted(run: Run) -> tuple[Found | None, tuple[str, ...]]:
    """The planner's prediction of a resolved Run; or None, and why there is none."""
    try:
        found = judge(run.model, run.fixed_layout, run.cluster, run.recipe, own_stack(run.cluster.gpu))
    except InputError as error:
        return None, (f"no prediction: {error}",)
    return found, ()


def line_of(
    verb: str, run: Run, found: Found | None, *, step_seconds: float | None, live_gib: float | None
) -> dict[str, Any]:
    """One line of predictions.jsonl."""
    return {
        "verb": verb,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "chip": run.cluster.gpu.name,
        "run": run.dump(),
        "predicted": {
            "class": "closed-form",
            "step_seconds": found.step.seconds if found else None,
            "live_gib": found.memory.live / GIB if found and live_gib is not None else None,
        },
        "measured": {"class": "measured", "step_seconds": step_seconds, "live_gib": live_gib},
    }


def append(out: Path, line: dict[str, Any]) -> None:
    """Raises OSError where the disk refuses."""
    with (out / PREDICTIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def median_step(seconds: Sequence[float]) -> float | None:
    """Of a session's steps, without the first ones; None where there are too few."""
    counted = seconds[_WARM_UP:]
    return statistics.median(counted) if len(counted) >= _FEWEST else None


def in_words(line: dict[str, Any]) -> str | None:
    """'predicted beside measured: step 0.52 s, 0.55 s (−5.5 %); …'; None where nothing can be compared."""
    parts = []
    for key, name, unit in (("step_seconds", "step", "s"), ("live_gib", "live memory", "GiB")):
        expected, found = line["predicted"][key], line["measured"][key]
        if expected is not None and found:
            off = f"{100 * (expected / found - 1):+.1f}".replace("-", "−")
            parts.append(f"{name} {expected:.3g} {unit}, {found:.3g} {unit} ({off} %)")
    return "predicted beside measured: " + "; ".join(parts) if parts else None


def own_error(runs: Path, chip: str) -> str | None:
    """How far predictions were off on this machine, by the records below a directory of runs: one line, None where
    there are none of this chip."""
    errors: dict[str, list[float]] = {"step_seconds": [], "live_gib": []}
    for line in _lines(runs):
        if line.get("chip") != chip:
            continue
        for key, found in errors.items():
            expected, measured = (line.get(side, {}).get(key) for side in ("predicted", "measured"))
            if expected and measured:
                found.append(abs(expected / measured - 1))
    words = {"step_seconds": "step time", "live_gib": "live memory"}
    texts = [
        f"{words[key]} off by {100 * statistics.median(found):.1f} % in the median of {len(found)}"
        for key, found in errors.items()
        if found
    ]
    return f"measured on this machine ({runs}/*/{PREDICTIONS}): {', '.join(texts)}" if texts else None


def _lines(runs: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(runs.glob(f"*/{PREDICTIONS}")):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            continue
        for row in text.splitlines():
            try:
                line = json.loads(row)
            except ValueError:  # a run that was killed may have left half of one
                continue
            if isinstance(line, dict):
                yield line
