"""A save that fails costs nothing but that save: no manifest, one line, the last good checkpoint untouched."""

import contextlib
import os
import resource
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny import FIELDS, checkpointer, save
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from ranks import RankPool
from shardwise.checkpoints import save as save_module
from shardwise.checkpoints.manifest import inspect, list_checkpoints, newest_complete, step_name, verify
from shardwise.checkpoints.restore import restore
from shardwise.spec import CheckpointFile, InputError

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

KIB = 1024


def state_of(step, kib=64):
    """A tensor that is the same on every rank, and one that is not. Both are written."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"all": torch.full((kib * KIB // 4,), float(step)), f"rng/{rank}": torch.full((kib * KIB // 4,), step + 0.5)}


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def disk_full_half_way(self, path, mode):
    @contextlib.contextmanager
    def stream():
        with Path(path).open(mode) as real:
            write, left = real.write, [40 * KIB]

            def limited(content):
                left[0] -= len(bytes(content))
                if left[0] < 0:
                    raise OSError(28, "No space left on device")
                return write(content)

            yield mock.Mock(wraps=real, write=limited)

    return stream()


def directory_deleted(self, path, mode):
    shutil.rmtree(Path(path).parent, ignore_errors=True)
    return Path(path).open(mode)


@contextlib.contextmanager
def file_size_limit():
    """The kernel's own refusal; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 * KIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def a_file_nobody_sees(self, path):
    return [CheckpointFile(name="__1_7.distcp", bytes=1, sha256="")]


def patch(target, name, replacement):
    return lambda: mock.patch.object(target, name, replacement)


READ_ONLY = raising(OSError(30, "Read-only file system"))
FAULTS = {  # name: (rank, what breaks there, what is said)
    "disk full": (1, patch(FileSystem, "create_stream", disk_full_half_way), "No space left on device (rank 1)"),
    "cannot open": (
        1,
        patch(FileSystem, "create_stream", raising(PermissionError(13, "Permission denied", "x"))),
        "Permission denied: x (rank 1)",
    ),
    "file too large": (1, file_size_limit, "File too large (rank 1)"),
    "directory deleted": (1, patch(FileSystem, "create_stream", directory_deleted), "No such file or directory"),
    "index": (0, patch(FileSystem, "rename", READ_ONLY), "Read-only file system (rank 0)"),
    "index lost": (0, patch(FileSystemWriter, "finish", lambda *_, **__: None), "No such file or directory"),
    "planning": (
        1,
        patch(FileSystemWriter, "prepare_local_plan", raising(RuntimeError("why\nso"))),
        "RuntimeError: why (rank 1)",
    ),
    "staging": (1, patch(save_module.BlockingAsyncStager, "stage", raising(MemoryError())), "MemoryError (rank 1)"),
    "mkdir": (0, patch(Path, "mkdir", READ_ONLY), "Read-only file system (rank 0)"),
    "hashing": (1, patch(save_module, "describe_file", READ_ONLY), "Read-only file system (rank 1)"),
    "manifest": (
        0,
        patch(save_module, "write_manifest", raising(OSError(28, "No space left on device"))),
        "No space left on device (rank 0)",
    ),
    "not shared": (
        1,
        patch(save_module.Checkpointer, "_written", a_file_nobody_sees),
        "every rank must see the same directory: __1_7.distcp (rank 0)",
    ),
}


def three_saves(directory, fault, asynchronous):
    """Steps 10, 20 and 30; `fault` is there at 20 only. Training goes on meanwhile."""
    broken_rank, breakage, _ = FAULTS[fault]
    said, errors = [], []
    saver = checkpointer(directory, said, asynchronous=asynchronous)
    for step in (10, 20, 30):
        with breakage() if step == 20 and dist.get_rank() == broken_rank else contextlib.nullcontext():
            saver.save(step, state_of(step), tokens=step, **FIELDS)
            for _ in range(20):
                total = torch.ones(8)
                dist.all_reduce(total)
                assert total.tolist() == [2.0] * 8
            saver.wait()
        errors.append(saver.last_error)
        if step == 20 and dist.get_rank() == 0:
            assert not (directory / step_name(20)).exists()
    saver.close()
    return errors, said


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank(tmp_path, ranks, fault, asynchronous):
    if fault == "staging" and not asynchronous:
        pytest.skip("nothing is staged")
    (errors, said), (other_errors, silent) = ranks(2).run(three_saves, tmp_path, fault, asynchronous)
    assert errors == other_errors  # every rank knows
    assert errors[0] is None
    assert errors[2] is None
    assert errors[1].startswith("checkpoint of step 20 was not saved: ")
    assert FAULTS[fault][2] in errors[1]
    assert said == [f"{errors[1]}. The last good one is step-00000010."]
    assert silent == []
    assert "\n" not in said[0]
    entries = list_checkpoints(tmp_path)
    assert [entry.step for entry in entries] == [30, 10]
    assert all(verify(entry) is None for entry in entries)
    for entry in entries:
        state = state_of(0)
        restore(entry.path, state)
        assert state["all"].unique().tolist() == [entry.step]
        assert state["rng/0"].unique().tolist() == [entry.step + 0.5]


def test_the_first_save_fails(tmp_path):
    said = []
    saver = checkpointer(tmp_path, said)
    with mock.patch.object(FileSystem, "create_stream", disk_full_half_way):
        saver.save(10, state_of(10), tokens=0, **FIELDS)
    assert said == [
        "checkpoint of step 10 was not saved: No space left on device (rank 0). There is no good one before it."
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_of_the_operating_system(tmp_path):
    """/dev/full refuses every write."""

    def open_full(self, path, mode):
        return Path("/dev/full").open(mode) if "distcp" in str(path) else Path(path).open(mode)

    said = []
    with mock.patch.object(FileSystem, "create_stream", open_full):
        checkpointer(tmp_path, said).save(10, state_of(10, kib=1), tokens=0, **FIELDS)
    assert said[0].startswith("checkpoint of step 10 was not saved: No space left on device (rank 0).")


def unwritable(directory):
    with pytest.raises(InputError) as refusal:
        checkpointer(directory, [])
    return str(refusal.value)


def test_an_unwritable_directory_is_refused_before_training(tmp_path, ranks):
    (tmp_path / "file").touch()
    for text in [unwritable(tmp_path / "file"), *ranks(2).run(unwritable, tmp_path / "file")]:
        assert text == f"{tmp_path}/file: checkpoints cannot be written there: File exists: {tmp_path}/file (rank 0)"
    with pytest.raises(InputError, match="keep is 0; nearest: 1"):
        checkpointer(tmp_path, [], keep=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in unwritable(tmp_path)
    assert "Permission denied" in unwritable(tmp_path / "deeper")


def test_a_directory_that_becomes_unwritable_and_writable_again(tmp_path):
    directory, said = tmp_path / "checkpoints", []
    saver = checkpointer(directory, said)
    directory.rmdir()
    directory.touch()
    saver.save(10, state_of(10), tokens=0, **FIELDS)
    assert "Not a directory" in saver.last_error
    assert len(said) == 1
    directory.unlink()
    saver.save(20, state_of(20), tokens=0, **FIELDS)
    assert saver.last_error is None
    assert [entry.step for entry in list_checkpoints(directory)] == [20]


def leave_half_a_save(directory):
    path = directory / step_name(20)
    path.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", "__9_0.distcp", ".metadata", "manifest.json.tmp"):
        (path / name).write_bytes(b"left over")


def save_twice(directory):
    said = []
    if dist.get_rank() == 0:
        leave_half_a_save(directory)
    dist.barrier()
    saver = checkpointer(directory, said, asynchronous=True)
    saver.save(20, state_of(20), tokens=0, **FIELDS)
    saver.wait()
    assert saver.last_error is None
    times = {file.name: file.stat().st_mtime_ns for file in (directory / step_name(20)).iterdir()}
    saver.save(20, state_of(21), tokens=0, **FIELDS)  # never overwrites a complete one
    saver.close()
    assert saver.last_error is None
    assert {file.name: file.stat().st_mtime_ns for file in (directory / step_name(20)).iterdir()} == times
    return said


def test_the_same_step_again(tmp_path, ranks):
    assert ranks(2).run(save_twice, tmp_path) == [[], []]
    path = tmp_path / step_name(20)
    assert sorted(file.name for file in path.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
    ]
    assert verify(inspect(path)) is None


def save_20(directory):
    save(directory, 20, state_of(20), asynchronous=True)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_of_an_earlier_process_is_checked_before_it_is_kept(tmp_path, ranks, damaged):
    ranks(2).run(save_20, tmp_path)
    shard = tmp_path / step_name(20) / "__1_0.distcp"
    if damaged:  # same size: only its content tells
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    before = shard.stat().st_mtime_ns
    ranks(2).run(save_20, tmp_path)
    assert (shard.stat().st_mtime_ns != before) == damaged
    assert verify(inspect(shard.parent)) is None


def keep_two(directory):
    saver = checkpointer(directory, [], asynchronous=True, keep=2)
    for step in (10, 20, 30, 40):
        saver.save(step, state_of(step), tokens=0, **FIELDS)
    saver.close()


def test_retention(tmp_path, ranks):
    (tmp_path / step_name(5)).mkdir()  # a killed save
    (tmp_path / step_name(90)).mkdir()
    ranks(2).run(keep_two, tmp_path)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [90, 40, 30]


def test_a_failed_removal_is_said_and_is_no_failed_save(tmp_path):
    said = []
    saver = checkpointer(tmp_path, said, keep=1)
    saver.save(10, state_of(10), tokens=0, **FIELDS)
    with mock.patch("shutil.rmtree", raising(PermissionError(13, "Permission denied", "x"))):
        saver.save(20, state_of(20), tokens=0, **FIELDS)
    assert saver.last_error is None
    assert said == ["old checkpoints could not be removed: Permission denied: x"]
    assert newest_complete(tmp_path, say=said.append).step == 20


def test_only_tensors_can_be_saved(tmp_path):
    saver = checkpointer(tmp_path, [])
    with pytest.raises(TypeError, match=r"position\.epoch: only tensors can be saved, not int"):
        saver.save(10, {"position": {"epoch": 3}}, tokens=0, **FIELDS)


def hang_on_rank_1(directory):
    """Storage that does not answer: neither rank waits longer than the timeout."""
    said, release = [], threading.Event()
    saver = checkpointer(directory, said, asynchronous=True, timeout=4.0)
    saver.save(10, state_of(10), tokens=0, **FIELDS)
    saver.wait()
    assert saver.last_error is None
    breakage = mock.patch.object(FileSystem, "create_stream", lambda *_: release.wait())
    with breakage if dist.get_rank() == 1 else contextlib.nullcontext():
        saver.save(20, state_of(20), tokens=0, **FIELDS)
        saver.wait()
    first = saver.last_error
    saver.save(30, state_of(30), tokens=0, **FIELDS)
    saver.wait()
    total = torch.ones(1)
    dist.all_reduce(total)  # training goes on
    release.set()
    return first, saver.last_error, said


def test_a_hang_is_bounded(tmp_path):
    pool = RankPool(2)
    (first, last, said), (first_on_1, last_on_1, _) = pool.run(hang_on_rank_1, tmp_path)
    pool.close()
    assert first.startswith("checkpoint of step 20 was not saved: the ranks lost touch with each other")
    assert last.startswith("checkpoint of step 30 was not saved: the ranks lost touch with each other")
    assert len(said) == 2
    assert "still hangs" in first_on_1 or "lost touch" in first_on_1
    assert "was not saved" in last_on_1
    assert newest_complete(tmp_path, say=print).step == 10
