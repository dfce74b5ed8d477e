"""Launch: N ranks on this machine, as one command that stops, fails and ends as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from shardwise.launching.stop import StopSignal, stop_signals_held
from shardwise.launching.worker import LAUNCHER

Say = Callable[[str], None]

_POLL_SECONDS = 0.05
_KILL_SECONDS = 10.0  # SIGKILL acts at once, unless the kernel itself waits (a disk, a driver)


def launch(command: Sequence[str], ranks: int, *, say: Say, how_to_continue: str, grace_seconds: float = 10) -> int:
    """Run `command` as `ranks` ranks of one process group on this machine and return the exit code of the whole.

    Each rank gets torch's environment (RANK, LOCAL_RANK, WORLD_SIZE, …) and a session of its own, so that a
    terminal's Ctrl-C reaches the launcher alone. Main thread only.

    - SIGTERM, SIGHUP, SIGUSR1 and the first Ctrl-C reach every rank as SIGTERM. It stays pending there until the rank
      enters a StopSignal, so it may come at any time. Ctrl-C during a stop kills all ranks: 3.
    - Once a rank fails, the others have `grace_seconds` to end by themselves before they are killed.
    - 0: all ranks returned 0. 4: some returned 4, the rest 0. 2: the first to fail returned 2. 3: anything else.
    """
    if ranks < 1:
        raise ValueError(f"ranks {ranks} must be at least 1")
    workers: dict[int, subprocess.Popen[bytes]] = {}
    with StopSignal() as stop:
        try:
            try:
                _start(command, ranks, workers)
            except OSError as error:
                say(f"rank {len(workers)} could not be started: {error}")
                return 3
            codes, first, aborted = _supervise(dict(workers), stop, say, grace_seconds)
        finally:
            _kill({rank: worker for rank, worker in workers.items() if worker.poll() is None}, say)
    if aborted:
        say("aborted; the steps since the last checkpoint are lost")
        return 3
    code, lines = verdict(codes, first)
    for line in [*lines, *([how_to_continue] if code == 4 else [])]:
        say(line)
    return code


def verdict(codes: Mapping[int, int], first: Mapping[int, int]) -> tuple[int, list[str]]:
    """Exit code of the whole, and what to say about it.

    `codes` are the return codes of all ranks (negative: the signal that ended one), `first` of those that failed
    before any other, in the same instant.
    """
    if not first:
        return (4 if 4 in codes.values() else 0), []
    unexplained = {rank: code for rank, code in first.items() if code not in (2, 3)}  # with 2 and 3 a rank says why
    killed = {rank: code for rank, code in unexplained.items() if code < 0}
    lines = [_how_it_ended(rank, code) for rank, code in (killed or unexplained).items()]
    return (2 if 2 in first.values() else 3), lines


def _how_it_ended(rank: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"rank {rank} was killed by {name}" + (" (perhaps out of host memory)" if name == "SIGKILL" else "")


def _start(command: Sequence[str], ranks: int, workers: dict[int, subprocess.Popen[bytes]]) -> None:
    """Fill `workers`, one process per rank. Raises OSError; then those that were started stand in it."""
    port = _free_port()
    with stop_signals_held():  # the ranks inherit this
        for rank in range(ranks):
            environment = _environment(rank, ranks, port, os.environ)
            workers[rank] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def _supervise(
    running: dict[int, subprocess.Popen[bytes]], stop: StopSignal, say: Say, grace_seconds: float
) -> tuple[dict[int, int], dict[int, int], bool]:
    """Wait until all ranks have ended, passing on a stop and ending them after a failure.

    Returns the codes of those that ended, of those that failed first, and whether the user aborted.
    """
    codes: dict[int, int] = {}
    first: dict[int, int] = {}
    passed_on, deadline = False, float("inf")
    while True:
        for rank, worker in list(running.items()):
            if (code := worker.poll()) is not None:
                codes[rank] = code
                del running[rank]
                _kill_group(worker)  # processes that it left behind
        if not first and (first := {rank: code for rank, code in codes.items() if code not in (0, 4)}):
            deadline = time.monotonic() + grace_seconds
        if not running or stop.abort:
            return codes, first, bool(running)
        if stop.requested and not passed_on:
            for worker in running.values():
                worker.terminate()
            passed_on = True
            again = "Ctrl-C again aborts" if stop.reason == "SIGINT" else f"Ctrl-C aborts ({stop.reason} received)"
            say(f"stopping after the step in flight; {again}")
        if time.monotonic() > deadline:
            late = ", ".join(map(str, running))
            say(f"killing rank {late}: still running {grace_seconds:g} s after rank {next(iter(first))} failed")
            return codes, first, False
        time.sleep(_POLL_SECONDS)


def _kill(running: Mapping[int, subprocess.Popen[bytes]], say: Say) -> None:
    for worker in running.values():
        _kill_group(worker)
    deadline = time.monotonic() + _KILL_SECONDS
    for rank, worker in running.items():
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            say(f"rank {rank} (process {worker.pid}) was killed but has not ended yet")


def _kill_group(worker: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the rank and its children. Call it right after the rank ended, before its number can be reused."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, where all have ended
        os.killpg(worker.pid, signal.SIGKILL)


def _environment(rank: int, ranks: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed's env:// reads, and a fair share of CPU threads unless the user chose."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Left over from an outer torchrun, these would make rank 0 look for a store that nobody hosts.
    kept = {key: value for key, value in base.items() if not key.startswith("TORCHELASTIC_")}
    return {
        "OMP_NUM_THREADS": str(max(1, cpus // ranks)),
        **kept,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LAUNCHER: str(os.getpid()),
    }


def _free_port() -> int:
    """A TCP port that is free now on every interface, because torch's store listens on all of them."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
