"""FailureWatch: real ranks on gloo and a TCPStore, and the messages by themselves on a stand-in store."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.launching import FailureWatch
from shardwise.spec import InputError

WAIT_SECONDS = 120

LAUNCHER = """
import sys
from shardwise.launching import launch
say = lambda line: sys.stderr.write(f"SAID {line}\\n")
sys.exit(launch([sys.executable, "-c", sys.argv[1]], 2, say=say, how_to_continue="", grace_seconds=60))
"""

RANK = """
import os, signal, sys, time
from shardwise.launching import FailureWatch, run_worker
from shardwise.spec import InputError
def body():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    with FailureWatch(store, rank, f"dp_replicate 0, dp_shard {rank}") as watch:
        dist.all_reduce(torch.ones(1))
        BODY
    return 0
sys.exit(run_worker(body))
"""


def two_ranks(body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LAUNCHER, RANK.replace("BODY", body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_error_ends_ranks_that_are_stuck_in_a_collective(failing):
    # The launcher's grace is longer than the test may take: the other rank has to end by itself.
    done = two_ranks(
        f"if rank == {failing}: raise RuntimeError('the first error')\n        dist.all_reduce(torch.ones(1))"
    )
    assert done.returncode == 3
    message = f"rank {failing} (dp_replicate 0, dp_shard {failing}) failed: RuntimeError: the first error"
    assert done.stderr.count(message) == 1
    assert done.stderr.count("Traceback") == 1
    assert "killing rank" not in done.stderr


def test_a_wrong_input_on_one_rank_is_told_without_traceback_and_ends_with_2():
    # Rank 1 does not talk to rank 0, so nothing but the watch can end it.
    done = two_ranks("if rank == 0: raise InputError('recipe.data: no such directory')\n        time.sleep(600)")
    assert (done.returncode, done.stderr) == (2, "error: recipe.data: no such directory\n")


def test_a_host_that_is_killed_ends_the_others():
    done = two_ranks("rank == 0 and os.kill(os.getpid(), signal.SIGKILL)\n        time.sleep(600)")
    assert done.returncode == 3
    told = done.stderr.splitlines()  # beside what torch's own store logs
    assert told.count("contact with the other ranks is lost; ending all ranks") == 1
    assert told[-1] == "SAID rank 0 was killed by SIGKILL (perhaps out of host memory)"


def test_a_host_that_ends_earlier_is_not_taken_for_a_failure():
    done = two_ranks("time.sleep(1.5 * rank)  # several polls longer than rank 0")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failure_after_the_host_has_finished_is_still_told():
    done = two_ranks("if rank == 1: time.sleep(1); raise OSError('disk full')")
    assert done.returncode == 3
    assert done.stderr.count("rank 1 (dp_replicate 0, dp_shard 1) failed: OSError: disk full") == 1


class Stored(dict):
    """A store in memory, with no more than FailureWatch requires."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


class Unreachable(Stored):
    def check(self, keys):
        raise RuntimeError("connection reset")


def marked(store, error, rank=1) -> int:
    watch = FailureWatch(store, rank, "tp 1", world=2, poll_seconds=600)
    try:
        raise error
    except type(error) as caught:
        return watch.mark(caught)


def test_only_the_first_failure_is_told_and_its_code_is_everybodys(capsys):
    store = Stored()
    assert marked(store, InputError("recipe.data: no such\nKnown: builtin")) == 2
    assert capsys.readouterr().err == "error: recipe.data: no such\nKnown: builtin\n"
    assert marked(store, RuntimeError("connection closed by peer"), rank=0) == 2
    assert capsys.readouterr().err == ""


def test_an_internal_error_is_told_with_its_traceback_and_its_first_line_last(capsys):
    assert marked(Stored(), KeyError("weight\nmore")) == 3
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("Traceback")
    assert told[-1] == r"rank 1 (tp 1) failed: KeyError: 'weight\nmore'"


def test_an_error_is_told_although_the_store_is_gone(capsys):
    assert marked(Unreachable(), OSError("disk full")) == 3
    assert (
        capsys.readouterr().err
        == "rank 1 (tp 1) failed: OSError: disk full (and contact with the other ranks is lost)\n"
    )


def test_errors_without_text_and_with_undecodable_text_are_marked(capsys):
    assert marked(Stored(), AssertionError()) == 3
    assert "rank 1 (tp 1) failed: AssertionError: no message" in capsys.readouterr().err
    store = Stored()
    assert marked(store, OSError("no file \udcff")) == 3
    assert store.check(["shardwise/failed"])


def test_a_single_rank_closes_at_once():
    with FailureWatch(Stored(), 0, "", world=1, poll_seconds=600) as watch:
        pass
    assert not watch._thread.is_alive()
