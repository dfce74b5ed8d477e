"""What a person sees while a run trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardwise.spec import Step
from shardwise.spec.numbers import human

_PLAIN_SECONDS = 2.0  # least time between two plain lines


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
    if step.data_wait_fraction > 0.02:
        parts.append(f"input wait {step.data_wait_fraction:.0%}")
    return "  ".join(parts)


class ProgressLine:
    """Shows steps and messages on stdout. A context manager; `shown=False` (every rank but 0) says nothing."""

    def __init__(self, total: int, *, shown: bool):
        self._total, self._shown = total, shown
        self._last_plain = 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if shown and sys.stdout.isatty():
            columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(
                *columns, console=Console(file=sys.stdout, highlight=False), transient=True, refresh_per_second=4
            )
            self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: Step, *, first: bool = False) -> None:
        """Show a finished step; plain output shows the first, the last, and one every two seconds."""
        if not self._shown:
            return
        if self._bar:
            self._bar.update(self._task, completed=step.step, description=step_line(step, self._total))
            return
        now = time.monotonic()
        if first or step.step == self._total or now - self._last_plain >= _PLAIN_SECONDS:
            self._last_plain = now
            self.say(step_line(step, self._total))

    def say(self, text: str) -> None:
        """Show a message above the live line."""
        if not self._shown:
            return
        if self._bar:
            self._bar.console.print(text, markup=False)
        else:
            print(text, flush=True)
