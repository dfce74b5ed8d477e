"""SIGKILL at every point of a save: what remains is the old checkpoint or the new one, whole, never a mixture."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny import FIELDS, checkpointer, save
from torch.distributed.checkpoint.filesystem import FileSystem

from shardwise.checkpoints.manifest import list_checkpoints, newest_complete
from shardwise.checkpoints.restore import restore

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def state_of(step):
    return {"model": {"weight": torch.full((3000,), float(step)), "bias": torch.full((7,), step + 0.5)}}


def check(directory):
    """The newest good checkpoint holds exactly what was saved at its step, which is returned."""
    entry = newest_complete(directory, say=lambda _: None)
    assert entry is not None
    state = state_of(0)
    restore(entry.path, state)
    assert state["model"]["weight"].unique().tolist() == [entry.step]
    assert state["model"]["bias"].unique().tolist() == [entry.step + 0.5]
    return entry.step


def in_forks(world, function, *arguments):
    """Exit codes by rank: -9 where it was killed. With more than one rank, they have a gloo group."""

    def body(rank, store):
        torch.set_num_threads(1)
        if world > 1:
            wait = timedelta(seconds=30)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}/store", rank=rank, world_size=world, timeout=wait
            )
        function(*arguments)

    with tempfile.TemporaryDirectory() as store:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=body, args=(rank, store)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def killed_at_operation(directory, number, asynchronous):
    """Save step 20, and die right before the file operation of this number."""
    left = [number]

    def count(event, arguments):
        if event in CHANGES or (event == "open" and str(arguments[0]).startswith(str(directory))):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(directory, 20, state_of(20), keep=1, asynchronous=asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_before_every_file_operation(tmp_path, asynchronous):
    before, steps = tmp_path / "before", []
    save(before, 10, state_of(10))
    for number in range(1, 200):
        directory = tmp_path / str(number)
        shutil.copytree(before, directory)
        [exit_code] = in_forks(1, killed_at_operation, directory, number, asynchronous)
        steps.append(check(directory))
        save(directory, 20, state_of(20), keep=1)  # the restarted run gets through, and cleans up
        assert check(directory) == 20
        assert [entry.step for entry in list_checkpoints(directory)] == [20]
        shutil.rmtree(directory)
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
    assert steps == sorted(steps)
    assert steps.count(10) >= 8  # the points before the manifest
    assert steps.count(20) >= 3  # the points after it, while the old one is removed


def killed_in_the_middle_of_a_write(directory, size):
    def create(self, path, mode):
        @contextlib.contextmanager
        def stream():
            with Path(path).open(mode) as real:
                left = [size]

                def write(content):
                    content = bytes(content)
                    if len(content) > left[0]:
                        real.write(content[: left[0]])
                        real.flush()
                        os.kill(os.getpid(), signal.SIGKILL)
                    left[0] -= len(content)
                    return real.write(content)

                yield mock.Mock(wraps=real, write=write)

        return stream()

    with mock.patch.object(FileSystem, "create_stream", create):
        save(directory, 20, state_of(20))


def test_killed_in_the_middle_of_a_write(tmp_path):
    save(tmp_path, 10, state_of(10))
    for size in (0, 1, 700, 5000, 13_000):
        assert in_forks(1, killed_in_the_middle_of_a_write, tmp_path, size) == [-signal.SIGKILL]
        said = []
        entry = newest_complete(tmp_path, say=said.append)
        assert entry is not None
        assert entry.step == check(tmp_path) == 10
        assert said == ["step-00000020 is skipped: it has no manifest, so its save never finished"]
    save(tmp_path, 20, state_of(20))
    assert check(tmp_path) == 20


def rank_1_is_killed(directory, when, asynchronous):
    """Returns only on rank 0, which must learn of it at once."""
    said = []
    saver = checkpointer(directory, said, asynchronous=asynchronous)
    saver.save(10, state_of(10), tokens=0, **FIELDS)
    saver.wait()
    target, name = {
        "writing": (FileSystem, "create_stream"),
        "hashing": (sys.modules["shardwise.checkpoints.save"], "describe_file"),
    }[when]
    dying = mock.patch.object(target, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with dying if dist.get_rank() == 1 else contextlib.nullcontext():
        saver.save(20, state_of(20), tokens=0, **FIELDS)
        saver.wait()
    (directory / "said").write_text("\n".join(said))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("when", ["writing", "hashing"])
def test_one_of_two_ranks_is_killed(tmp_path, ranks, when, asynchronous):
    assert in_forks(2, rank_1_is_killed, tmp_path, when, asynchronous) == [0, -signal.SIGKILL]
    said = (tmp_path / "said").read_text().splitlines()
    assert len(said) == 1
    assert said[0].startswith("checkpoint of step 20 was not saved: the ranks lost touch with each other (")
    assert said[0].endswith("The last good one is step-00000010.")
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [10]
    assert check(tmp_path) == 10
    ranks(2).run(save, tmp_path, 20, state_of(20))
    assert check(tmp_path) == 20
