"""What a person sees while a run trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.spec import Step
from shardwise.spec.numbers import human


def step_line(step: Step, total: int) -> str:
    """One step in one line: 'step 40/100  loss 3.2123  grad_norm 0.52  lr 6.0e-04  123.4K tokens/s …'."""
    parts = [
        f"step {step.step}/{total}",
        f"loss {step.loss:.4f}",
        f"grad_norm {step.grad_norm:.3f}" if step.grad_norm is not None else "overflow, skipped",
        f"lr {step.lr:.2e}",
        f"{human(step.tokens_per_second)} tokens/s",
    ]
    if step.mfu is not None:
        parts.append(f"mfu {step.mfu:.1%}")
    if step.peak_memory_gib is not None:
        parts.append(f"{step.peak_memory_gib:.2f} GiB")
    if step.busiest_expert is not None:
        parts.append(f"busiest expert {step.busiest_expert:.1f}×")
    if step.data_wait_fraction > 0.02:
        parts.append(f"input wait {step.data_wait_fraction:.0%}")
    return "  ".join(parts)


class LiveLine:
    """On a terminal a bar with one changing line and messages above it; elsewhere plain lines, now and then.

    A context manager. plain_seconds: least time between two plain lines. time_left: whether the bar estimates it.
    """

    def __init__(self, file: TextIO, *, total: float | None, plain_seconds: float, time_left: bool = False):
        self._file, self._plain_seconds, self._last = file, plain_seconds, time.monotonic()
        self._bar: Progress | None = None
        if file.isatty():
            columns = [BarColumn(bar_width=20), TextColumn("{task.description}")]
            self._bar = Progress(
                *columns, *([TimeRemainingColumn()] if time_left else []),
                console=Console(file=file, highlight=False), transient=True, refresh_per_second=4,
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, text: str, *, done: float, total: float | None = None, always: bool = False) -> None:
        """The line as it now is. always: also as a plain line, however soon after the last."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total, description=text)
        elif always or time.monotonic() - self._last >= self._plain_seconds:
            self._last = time.monotonic()
            self.say(text)

    def say(self, text: str) -> None:
        """A message above the line."""
        if self._bar:
            self._bar.console.print(text, markup=False)
        else:
            print(text, file=self._file, flush=True)


class ProgressLine:
    """Shows steps and messages on stdout. A context manager; `shown=False` (every rank but 0) says nothing."""

    def __init__(self, total: int, *, shown: bool):
        self._total = total
        self._line = LiveLine(sys.stdout, total=total, plain_seconds=2.0, time_left=True) if shown else None

    def __enter__(self) -> Self:
        if self._line:
            self._line.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._line:
            self._line.__exit__()

    def step(self, step: Step, *, first: bool = False) -> None:
        """Show a finished step; plain output shows the first, the last, and one every two seconds."""
        if self._line:
            always = first or step.step == self._total
            self._line.show(step_line(step, self._total), done=step.step, always=always)

    def say(self, text: str) -> None:
        """Show a message above the live line."""
        if self._line:
            self._line.say(text)
