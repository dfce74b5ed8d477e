"""Jobs spread over worker processes. A worker is a fresh interpreter, so that neither threads nor the caller's main
module matter; it ends when its pipe does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from shardwise.data.encode import Setup, Tick
from shardwise.spec import InputError

Job = Callable[[Setup, Tick], None]  # a module's function, or a partial of one: it is pickled

_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class WorkerDied(RuntimeError):
    """A worker process ended by itself; the message says how."""


def run_jobs(jobs: Iterable[Job], setup: Setup, workers: int, tick: Tick) -> None:
    """Run each job once; in this process where `workers` is 1. Raises what the first job to fail does."""
    if workers == 1:
        for job in jobs:
            job(setup, tick)
        return
    pool = []
    try:
        pool = [_Worker(setup) for _ in range(workers)]
        _feed(iter(jobs), pool, tick)
    finally:
        for worker in pool:
            worker.end()


def _feed(jobs: Iterable[Job], pool: list[_Worker], tick: Tick) -> None:
    jobs = iter(jobs)
    idle, busy = list(pool), dict[object, _Worker]()
    while True:
        while idle and (job := next(jobs, None)):
            worker = idle.pop()
            worker.send(job)
            busy[worker.connection] = worker
        if not busy:
            return
        for connection in wait([worker.connection for worker in busy.values()]):
            worker = busy[connection]
            what, value = worker.receive()
            if what == "tick":
                tick(*value)
            elif what == "failed":
                raise value
            else:
                idle.append(worker)
                del busy[connection]


class _Worker:
    """One process, and this end of its pipe."""

    def __init__(self, setup: Setup):
        self.connection, theirs = Pipe()
        number = theirs.fileno()
        program = f"import sys; sys.path[:] = {sys.path!r}; from shardwise.data.workers import serve; serve({number})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[number],
            env={**_ONE_THREAD, **os.environ},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        theirs.close()
        self.send(setup)

    def send(self, thing: object) -> None:
        try:
            self.connection.send(thing)
        except OSError:
            raise self._died() from None

    def receive(self) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = self.connection.recv()
            return message
        except (EOFError, OSError):
            raise self._died() from None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()

    def _died(self) -> WorkerDied:
        self._process.kill()
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return WorkerDied(f"a worker process ended {how}; if memory ran out, use fewer --workers")


def serve(number: int) -> None:
    """The life of a worker: the setup, then one job after the other, until the pipe closes."""
    connection = Connection(number)
    try:
        setup = connection.recv()
        while True:
            job = connection.recv()
            try:
                job(setup, lambda *done: connection.send(("tick", done)))
            except (OSError, InputError) as error:
                connection.send(("failed", error))
            except Exception:
                connection.send(("failed", RuntimeError(f"in a worker process:\n{traceback.format_exc()}")))
            else:
                connection.send(("done", None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
