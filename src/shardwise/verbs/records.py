"""Records: all that a run leaves behind beside checkpoints. Rank 0 writes it."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.evaluation.bands import Bands, check_all, summarize
from shardwise.report.background import Background
from shardwise.report.page import write_report
from shardwise.training.metrics import Journal

_JOURNALS = ("metrics", "evaluations", "events")


class Records:
    """The journals of RUN_DIR, dashboards, and at the end report.html. Does nothing on the ranks where it is not
    `active`.

    Events are the few lines from which one can tell where the time went: `seconds` on rank 0, and `time` at their end.
    Raises OSError where the disk refuses a line.
    """

    def __init__(
        self,
        out: Path,
        done: int,
        seconds: float,
        where: dict[str, Any],
        log: tuple[str, ...],
        say: Callable[[str], None],
        *,
        active: bool,
    ):
        """A session begins after step `done`, having taken `seconds` to get ready; `where` it runs goes into events."""
        self._out, self._say, self._active = out, say, active
        self._journals = {name: Journal(out / f"{name}.jsonl", done) for name in _JOURNALS} if active else {}
        self.event("resume" if done else "start", done, seconds, **where)
        self._dashboards = Background(log if active else (), out, say)  # they are named after the first event

    def step(self, record: dict[str, Any]) -> None:
        self._write("metrics", record)
        self._dashboards.log("train", record)

    def evaluation(self, record: dict[str, Any]) -> None:
        self._write("evaluations", record)
        self._dashboards.log("validation", record)

    def event(self, event: str, step: int, seconds: float, **fields: Any) -> None:
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._write("events", {"event": event, "step": step, "time": time, "seconds": round(seconds, 4), **fields})

    def close(self, bands: Bands | None, batch_tokens: int) -> bool:
        """Close the journals, compare all evaluations with `bands`, write the report, and leave the dashboards.

        Returns whether every checked evaluation was as expected; True where there are no bands.
        """
        expected = True
        for journal in self._journals.values():
            journal.close()
        if self._active:
            if bands:
                check_all(self._out / "evaluations.jsonl", bands, batch_tokens)
                expected, text = summarize(self._out / "evaluations.jsonl")
                self._say(text)
            write_report(self._out, self._say)
        self._dashboards.close()
        return expected

    def _write(self, journal: str, record: dict[str, Any]) -> None:
        if self._active:
            self._journals[journal].write(record)
