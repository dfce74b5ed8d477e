"""The launcher, with ranks that need no torch.

Every rank inherits the launcher's standard output, a pipe: reading it to its end proves that no rank is left.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from shardwise.launching.local import _environment, verdict

WAIT_SECONDS = 60

LAUNCHER = """
import os, signal, subprocess, sys
from shardwise.launching import launch
ranks, grace, body, before = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
exec(before)
say = lambda line: os.write(1, f"SAID {line}\\n".encode())  # in one piece; print may write two
sys.exit(launch([sys.executable, "-c", body], ranks, say=say, how_to_continue="HOW TO CONTINUE", grace_seconds=grace))
"""

# A rank that steps until it is told to stop; SETUP stands for the seconds that importing torch takes.
RANK = """
import os, signal, sys, time
from shardwise.launching import StopSignal, run_worker
rank = int(os.environ["RANK"])
def say(text):
    os.write(1, f"rank {rank} {text}\\n".encode())
def body():
    SETUP
    with StopSignal() as stop:
        say("steps")
        for _ in range(6000):
            if stop.requested:
                break
            time.sleep(0.01)
    say(f"stopped by {stop.reason}")
    ENDING
    return 4
sys.exit(run_worker(body))
"""


def rank(setup: str = "pass", ending: str = "pass") -> str:
    return RANK.replace("SETUP", setup).replace("ENDING", ending)


class Launched:
    """A launcher in a process of its own, and all lines that it and its ranks have printed so far."""

    def __init__(self, body: str, ranks: int = 2, *, grace: float = 30, before: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(ranks), str(grace), body, before],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def _next(self, deadline: float) -> str | None:
        try:
            line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self.process.kill()
            pytest.fail(f"nothing more within {WAIT_SECONDS} s after: {self.lines}")
        if line is not None:
            self.lines.append(line)
        return line

    def wait_for(self, text: str, times: int = 1) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while sum(text in line for line in self.lines) < times:
            if self._next(deadline) is None:
                pytest.fail(f"ended without {text!r}: {self.lines}")

    def finish(self) -> int:
        """The exit code, once the launcher and every rank have ended."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self._next(deadline) is not None:
            pass
        return self.process.wait(WAIT_SECONDS)

    @property
    def said(self) -> list[str]:
        return [line.removeprefix("SAID ") for line in self.lines if line.startswith("SAID ")]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_get_torchs_environment(ranks):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launched = Launched(
        f"import os; found = [*(os.environ[n] for n in {names}), os.environ['SHARDWISE_LAUNCHER'] == "
        "str(os.getppid()), os.getsid(0) == os.getpid()]; os.write(1, (' '.join(map(str, found)) + '\\n').encode())",
        ranks,
    )
    assert launched.finish() == 0
    assert launched.said == []
    found = sorted(line.split() for line in launched.lines)
    port = found[0][5]
    assert int(port) > 0
    assert found == [[str(r), str(r), str(ranks), str(ranks), "127.0.0.1", port, "True", "True"] for r in range(ranks)]


def test_threads_are_shared_unless_the_user_chose():
    assert int(_environment(0, 1, 1, {})["OMP_NUM_THREADS"]) >= 1
    assert _environment(0, 4096, 1, {})["OMP_NUM_THREADS"] == "1"
    assert _environment(0, 2, 1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in _environment(0, 2, 1, {"TORCHELASTIC_USE_AGENT_STORE": "True"})


@pytest.mark.parametrize(
    ("number", "ranks"), [("SIGTERM", 1), ("SIGTERM", 2), ("SIGINT", 2), ("SIGHUP", 2), ("SIGUSR1", 2)]
)
def test_a_stop_signal_ends_all_ranks_with_4(number, ranks):
    launched = Launched(rank(), ranks)
    launched.wait_for("steps", ranks)
    launched.process.send_signal(signal.Signals[number])
    assert launched.finish() == 4
    assert launched.said[0].startswith("stopping after the step in flight; Ctrl-C ")
    assert launched.said[1:] == ["HOW TO CONTINUE"]
    assert sum("stopped by SIGTERM" in line for line in launched.lines) == ranks


def test_a_stop_during_start_up_is_neither_lost_nor_deadly():
    # Sent the moment each rank exists, long before its Python has started: by the launcher and to the rank itself.
    before = """
class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(self.pid, signal.SIGUSR1)
subprocess.Popen = Popen
"""
    launched = Launched(rank(setup="say('starts'); time.sleep(0.5)"), before=before)
    assert launched.finish() == 4
    assert launched.said[-1] == "HOW TO CONTINUE"
    assert sum("starts" in line for line in launched.lines) == 2
    assert sum("stopped by" in line for line in launched.lines) == 2
    assert "Traceback" not in launched.text


def test_a_stop_while_ranks_wind_down_changes_nothing():
    wind_down = "say('winds down'); deadline = time.monotonic() + 60\n" + (
        "    while signal.SIGTERM not in signal.sigpending() and time.monotonic() < deadline: time.sleep(0.01)\n"
        "    return 0"
    )
    launched = Launched(rank(setup="os.kill(os.getpid(), signal.SIGUSR1)", ending=wind_down))
    launched.wait_for("winds down", 2)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.finish() == 0
    assert launched.text.count("stopped by SIGUSR1") == 2


def test_ctrl_c_twice_kills_ranks_that_do_not_listen():
    deaf = "import os, time; os.write(1, b'deaf\\n'); time.sleep(600)"  # never enters a StopSignal
    launched = Launched(deaf)
    launched.wait_for("deaf", 2)
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for("Ctrl-C again aborts")
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish() == 3
    assert launched.said[-1].startswith("aborted")
    assert "Traceback" not in launched.text


def test_sigterm_twice_does_not_abort():
    launched = Launched(rank(ending="say('saves'); time.sleep(0.5)"))
    launched.wait_for("steps", 2)
    launched.process.terminate()
    launched.wait_for("saves", 2)
    launched.process.terminate()
    assert launched.finish() == 4


def test_what_nohup_ignores_stays_ignored():
    launched = Launched(rank(), before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    launched.wait_for("steps", 2)
    launched.process.send_signal(signal.SIGHUP)
    launched.process.terminate()
    assert launched.finish() == 4
    assert "SIGTERM received" in launched.said[0]


def test_a_rank_killed_by_a_signal_is_named_and_the_others_end():
    launched = Launched(rank(setup="rank == 1 and os.kill(os.getpid(), signal.SIGKILL)"), grace=0.1)
    assert launched.finish() == 3
    assert launched.said[0].startswith("killing rank 0")
    assert launched.said[1:] == ["rank 1 was killed by SIGKILL (perhaps out of host memory)"]


def test_ranks_that_end_by_themselves_within_the_grace_are_not_killed():
    launched = Launched(rank(setup="rank == 1 and os._exit(7)", ending="say('ended by itself')"), grace=600)
    launched.wait_for("rank 0 steps")
    launched.process.terminate()
    assert launched.finish() == 3
    assert "rank 0 ended by itself" in launched.text
    assert launched.said[-1] == "rank 1 ended with exit code 7"


def test_a_wrong_input_is_told_once_and_ends_with_2():
    launched = Launched(rank(setup="from shardwise.spec import InputError; raise InputError('recipe.data: no such')"))
    assert launched.finish() == 2
    assert launched.lines == ["error: recipe.data: no such"]


def test_an_exception_in_a_rank_ends_with_3_and_its_traceback():
    launched = Launched(rank(setup="rank == 0 and 1 / 0"), grace=0.1)
    assert launched.finish() == 3
    assert launched.text.count("ZeroDivisionError: division by zero") == 1
    assert launched.said == ["killing rank 1: still running 0.1 s after rank 0 failed"]


def test_a_launcher_that_is_killed_leaves_no_rank():
    launched = Launched(rank(setup="time.sleep(600)"), ranks=3)
    time.sleep(0.2)  # some ranks may be running, others not
    launched.process.kill()
    assert launched.finish() == -signal.SIGKILL

    stepping = Launched(rank(), ranks=2)
    stepping.wait_for("steps", 2)
    stepping.process.kill()
    assert stepping.finish() == -signal.SIGKILL
    assert stepping.lines[-1] == "the launcher is gone; ending all ranks"


def test_what_a_rank_leaves_behind_is_ended():
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert Launched(child, ranks=1).finish() == 0


def test_a_command_that_does_not_exist_is_told():
    launched = Launched("", before="sys.executable = '/no/such/python'")
    assert launched.finish() == 3
    assert launched.said[0].startswith("rank 0 could not be started: ")


@pytest.mark.parametrize(
    ("codes", "first", "code", "lines"),
    [
        ([0, 0], {}, 0, []),
        ([4, 4], {}, 4, []),
        ([0, 4], {}, 4, []),
        ([2, 2], {0: 2, 1: 2}, 2, []),
        ([3, 2], {1: 2}, 2, []),
        ([3, 2], {0: 3}, 3, []),
        ([0, 1], {1: 1}, 3, ["rank 1 ended with exit code 1"]),
        ([4, 3], {1: 3}, 3, []),
        ([-9, 3], {0: -9, 1: 3}, 3, ["rank 0 was killed by SIGKILL (perhaps out of host memory)"]),
        ([-11], {0: -11}, 3, ["rank 0 was killed by SIGSEGV"]),
        ([-99], {0: -99}, 3, ["rank 0 was killed by signal 99"]),
    ],
)
def test_exit_codes(codes, first, code, lines):
    assert verdict(dict(enumerate(codes)), first) == (code, lines)


def test_stop_signal_restores_handlers_and_tells_a_second_ctrl_c():
    from shardwise.launching import STOP_SIGNALS, StopSignal

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.requested, stop.reason, stop.abort) == (True, "SIGUSR1", False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.reason, stop.abort) == ("SIGUSR1", False)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.abort
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert not set(STOP_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, [])
