"""Dashboards are fed from threads of their own: whatever one of them does, the run neither stops nor waits for it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.report.loggers import LOGGERS, Logger

_WAITING_RECORDS = 1000  # what does not fit any more is dropped
_CLOSE_SECONDS = 10.0  # for all of them together


class Background:
    """Runs loggers in daemon threads, one each: a slow one loses records, a failing one is switched off.

    A logger may leave threads and exit hooks behind that never return: a process that used any should end with
    `os._exit`, which waits for nothing.
    """

    def __init__(self, names: tuple[str, ...], out: Path, say: Callable[[str], None]):
        self._say = say
        self._queues = {name: queue.Queue[Any](_WAITING_RECORDS) for name in names}
        self._threads = {
            name: threading.Thread(target=_serve, args=(LOGGERS[name], out, records, name, say), daemon=True, name=name)
            for name, records in self._queues.items()
        }
        for thread in self._threads.values():
            thread.start()

    def log(self, group: str, record: dict[str, Any]) -> None:
        """Send the known numbers of one line of a journal, as `group/name`."""
        values = {f"{group}/{key}": value for key, value in record.items() if key != "step" and _is_number(value)}
        for records in self._queues.values():
            with contextlib.suppress(queue.Full):
                records.put_nowait((record["step"], values))

    def close(self) -> None:
        """Let the threads finish what waits, for some seconds at most; what is not sent by then is left behind."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        for name, records in self._queues.items():
            with contextlib.suppress(queue.Full):
                if self._threads[name].is_alive():
                    records.put(None, timeout=max(0.0, deadline - time.monotonic()))
        for name, thread in self._threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._say(f"--log {name} did not finish within {_CLOSE_SECONDS:g} s and is left behind")


def _serve(
    make: Callable[[Path], Logger], out: Path, records: queue.Queue[Any], name: str, say: Callable[[str], None]
) -> None:
    try:
        logger = make(out)
        while (record := records.get()) is not None:
            logger.log(*record)
        logger.close()
    except BaseException as error:  # SystemExit too: in a thread it would end the thread without a word
        say(f"--log {name} is off from here on: {type(error).__name__}: {error}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
