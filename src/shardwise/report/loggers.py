"""Metrics sent elsewhere, beside metrics.jsonl. Whatever a destination does, the run neither stops nor waits for it."""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shardwise.spec import InputError
from shardwise.spec.noun import unknown

_WAITING_RECORDS = 1000  # what does not fit any more is dropped
_CLOSE_SECONDS = 5.0


class Logger(Protocol):
    """A destination for numbers."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN_DIR/tensorboard."""

    def __init__(self, out: Path):
        from tensorboard.summary import Writer

        self._writer = Writer(str(out / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


LOGGERS: dict[str, Callable[[Path], Logger]] = {"tensorboard": TensorBoard}
_PACKAGES = {"tensorboard": "tensorboard"}


def require_loggers(names: tuple[str, ...]) -> None:
    """Raise InputError for a name that is unknown, or whose package is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise InputError(f"--log: {unknown('logger', name, LOGGERS)}")
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise InputError(f"--log {name} needs a package that is not installed: pip install 'shardwise[{name}]'")


class Background:
    """Runs loggers in threads of their own, one each: a slow one loses records, a failing one is switched off."""

    def __init__(self, names: tuple[str, ...], out: Path, say: Callable[[str], None]):
        self._lines = [(name, queue.Queue[Any](_WAITING_RECORDS)) for name in names]
        self._threads = [
            threading.Thread(target=_serve, args=(LOGGERS[name], out, records, name, say), daemon=True, name=name)
            for name, records in self._lines
        ]
        for thread in self._threads:
            thread.start()

    def log(self, record: dict[str, Any]) -> None:
        """Send every known number of a Step or Validation."""
        values = {key: value for key, value in record.items() if key != "step" and value is not None}
        for _, records in self._lines:
            with contextlib.suppress(queue.Full):
                records.put_nowait((record["step"], values))

    def close(self) -> None:
        """Let the threads finish what waits, for a few seconds at most."""
        for _, records in self._lines:
            with contextlib.suppress(queue.Full):
                records.put(None, timeout=_CLOSE_SECONDS)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)


def _serve(
    make: Callable[[Path], Logger], out: Path, records: queue.Queue[Any], name: str, say: Callable[[str], None]
) -> None:
    try:
        logger = make(out)
        while (record := records.get()) is not None:
            logger.log(*record)
        logger.close()
    except Exception as error:
        say(f"--log {name} is off from here on: {type(error).__name__}: {error}")
