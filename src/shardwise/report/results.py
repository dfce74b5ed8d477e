"""What a run directory holds, read leniently: a report is wanted most where something broke."""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.spec import InputError, Run, load_run

Record = dict[str, Any]
Column = npt.NDArray[np.float64]

_COLUMNS = (
    "step",
    "tokens",
    "loss",
    "grad_norm",
    "lr",
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "mfu_full_attention",
    "peak_memory_gib",
    "data_wait_fraction",
)


@dataclass(frozen=True)
class Results:
    """The files of one run. A number that is unknown or not finite is NaN in `steps`, None elsewhere."""

    name: str  # of the directory
    run: Run | None  # None where run.yaml is missing or not one
    run_text: str
    steps: dict[str, Column]  # one entry per step, ascending
    evaluations: list[Record]  # ascending steps
    events: list[Record]  # in the order in which they happened
    unreadable: dict[str, int]  # lines left out, by file


def read_results(out: Path) -> Results:
    """Read whatever of run.yaml, metrics.jsonl, evaluations.jsonl and events.jsonl is there."""
    run, text = None, ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (out / "run.yaml").read_text(encoding="utf-8")
    if text:
        with contextlib.suppress(InputError):
            run = load_run(out / "run.yaml")
    unreadable = {"metrics.jsonl": 0, "evaluations.jsonl": 0, "events.jsonl": 0}
    evaluations = {record["step"]: record for record in _records(out / "evaluations.jsonl", unreadable)}
    return Results(
        name=out.resolve().name,
        run=run,
        run_text=text,
        steps=_columns(_records(out / "metrics.jsonl", unreadable)),
        evaluations=[
            {key: value if isinstance(value, bool) else number(record, key) for key, value in record.items()}
            for _, record in sorted(evaluations.items())
        ],
        events=list(_records(out / "events.jsonl", unreadable)),
        unreadable={name: count for name, count in unreadable.items() if count},
    )


def number(record: Record, key: str) -> float | None:
    """A finite number of a record; None for anything else."""
    value = _number(record.get(key))
    return None if math.isnan(value) else value


def _number(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return math.nan


def _columns(records: Iterator[Record]) -> dict[str, Column]:
    """Of each step the last line, ascending. Numbers are kept from the start, since there may be millions of lines."""
    rows = array("d")
    for record in records:
        rows.extend(_number(record.get(name)) for name in _COLUMNS)
    table = np.frombuffer(rows, dtype=np.float64).reshape(-1, len(_COLUMNS))[::-1]
    _, last = np.unique(table[:, 0], return_index=True)
    return {name: table[last, index] for index, name in enumerate(_COLUMNS)}


def _records(path: Path, unreadable: dict[str, int]) -> Iterator[Record]:
    """The JSON objects of a file that have a step; other lines are counted in `unreadable`."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict) and not math.isnan(_number(record.get("step"))):
                    yield record
                elif line.strip():
                    unreadable[path.name] += 1
    except OSError:
        return
