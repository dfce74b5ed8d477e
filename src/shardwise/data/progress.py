"""Progress: how far `prepare` is, as numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """`done` and `total` are bytes of the sources while they are read, tokens while shards are written."""

    stage: str  # "reading" or "writing"
    unit: str  # "B" or "tokens"
    done: int
    total: int
    before: int  # of `done`: what an earlier, interrupted preparation did
    documents: int
    seconds: float

    @property
    def per_second(self) -> float | None:
        """None before anything was done."""
        return (self.done - self.before) / self.seconds if self.done > self.before and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """None in the first second, and before anything was done."""
        return (self.total - self.done) / self.per_second if self.per_second and self.seconds >= 1 else None


@dataclass
class Meter:
    """Counts one stage and tells it on."""

    stage: str
    unit: str
    total: int
    before: int
    show: Callable[[Progress], None]
    done: int = 0
    documents: int = 0
    _start: float = field(default_factory=time.monotonic)

    def tick(self, amount: int, documents: int) -> None:
        """So much more was done since the last tick."""
        self.done += amount
        self.documents += documents
        seconds = time.monotonic() - self._start
        done = self.before + self.done
        self.show(Progress(self.stage, self.unit, done, self.total, self.before, self.documents, seconds))
