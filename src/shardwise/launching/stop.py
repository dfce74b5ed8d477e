"""StopSignal: a request to stop, as a flag that a loop reads between two steps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

# A shell ignores SIGINT for background jobs, nohup ignores SIGHUP: these stay ignored where they were.
_MAY_STAY_IGNORED = (signal.SIGINT, signal.SIGHUP)


def hold_stop_signals() -> set[signal.Signals]:
    """Keep stop signals pending from now until a StopSignal is entered: neither acted on nor lost.

    The mask is inherited by child processes through exec, so that a worker can be stopped safely while Python starts
    and torch is imported. Returns those that were already held.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    return {number for number in STOP_SIGNALS if number in before}


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Hold stop signals within the block only; those that arrived take effect at its end."""
    before = hold_stop_signals()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(STOP_SIGNALS) - before)


class StopSignal:
    """Within the context, SIGTERM, SIGINT, SIGHUP and SIGUSR1 only set `requested`. Main thread only.

    A signal that was held before is seen as soon as the context is entered. At its end handlers and mask are as they
    were: where the signals were held, they are held again, so that none kills a process that is already winding down.
    """

    requested: bool = False
    reason: str = ""  # name of the first signal: "SIGTERM"
    abort: bool = False  # Ctrl-C (SIGINT) came although a stop was already requested

    def __enter__(self) -> Self:
        self._before: dict[signal.Signals, Any] = {}
        for number in STOP_SIGNALS:
            if number in _MAY_STAY_IGNORED and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._held = {number for number in STOP_SIGNALS if number in mask}
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        for number, handler in self._before.items():
            if handler is not None:  # None: it was not installed from Python and cannot be put back
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.abort = self.abort or (self.requested and number == signal.SIGINT)
        self.reason = self.reason or signal.Signals(number).name
        self.requested = True
