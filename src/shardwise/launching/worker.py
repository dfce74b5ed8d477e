"""One rank's process: it can be stopped from its first line on, and never outlives its launcher."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from shardwise.launching.stop import hold_stop_signals
from shardwise.spec import InputError

LAUNCHER = "SHARDWISE_LAUNCHER"  # the launcher's process id, in the environment of its workers

_POLL_SECONDS = 0.5
_FLUSH_SECONDS = 1.0


def run_worker(body: Callable[[], int]) -> int:
    """Run one rank's work and return its exit code. Call it before torch is imported.

    Holds stop signals until `body` enters a StopSignal, and again afterwards. An exception that reaches this function
    (most stop in FailureWatch) ends the process: InputError with 2, anything else with 3 and a traceback.
    """
    hold_stop_signals()
    watch_launcher()
    try:
        return body()
    except InputError as error:
        # Before the ranks are connected all of them find the same mistake; one per node tells.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            tell(f"error: {error}")
        end(2)
    except BaseException:
        tell(f"rank {os.environ.get('RANK', '0')} failed:\n{traceback.format_exc().rstrip()}")
        end(3)


@functools.cache
def watch_launcher() -> None:
    """End this process with 3 once its launcher is gone, even while the main thread is stuck in a collective.

    Does nothing where something else (torchrun, Slurm) started this process.
    """
    launcher = os.environ.get(LAUNCHER)
    if not launcher:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(_POLL_SECONDS)
        if os.environ.get("RANK") == "0":
            tell("the launcher is gone; ending all ranks")
        end(3)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def end_when_stopped() -> None:
    """For ranks with nothing to save and no step to wait for: end with 4 at the first SIGTERM, whatever the main thread
    does. run_worker holds the signal, in this thread too."""

    def wait() -> None:
        signal.sigwait([signal.SIGTERM])
        end(4)

    threading.Thread(target=wait, daemon=True).start()


def tell(text: str) -> None:
    """Write whole lines to standard error in one piece, so that ranks do not mix; a closed terminal is no error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def end(code: int) -> NoReturn:
    """Leave now, from any thread. No teardown: destroying a process group may wait for a rank that is gone."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    # In a thread of its own: the main thread may hold a stream's lock for ever, writing to a full pipe.
    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_SECONDS)
    os._exit(code)
