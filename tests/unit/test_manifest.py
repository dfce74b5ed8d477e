"""What counts as a checkpoint, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.checkpoints.manifest import (
    describe_file,
    inspect,
    list_checkpoints,
    newest_complete,
    remove_old,
    step_name,
    verify,
    write_manifest,
)
from shardwise.spec import Checkpoint, InputError

SHARD = "__0_0.distcp"


def make(directory: Path, step: int) -> Path:
    path = directory / step_name(step)
    path.mkdir(parents=True)
    for name in (".metadata", SHARD, "__1_0.distcp"):
        (path / name).write_bytes(f"{name} of step {step} ".encode() * 100)
    files = tuple(describe_file(file) for file in sorted(path.iterdir()))
    write_manifest(path, Checkpoint(step=step, tokens=step * 1000, world=2, files=files, run={}, data="d", versions={}))
    return path


def flip_bit(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def truncate(path: Path) -> None:
    (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-1])


def change_tokens(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace("20000", "20001"))


def point_outside(path: Path) -> None:
    checkpoint = inspect(path).checkpoint
    assert checkpoint is not None
    file = checkpoint.files[0].model_copy(update={"name": "../" + SHARD})
    write_manifest(path, checkpoint.model_copy(update={"files": (file,)}))


DAMAGES = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "no manifest"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text(""), "manifest is unreadable: it is empty"),
    "garbage": (lambda path: (path / "manifest.json").write_bytes(b"\xff\x00garbage"), "manifest is unreadable"),
    "nested": (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest is unreadable"),
    "a list": (lambda path: (path / "manifest.json").write_text("[]"), "does not match its own checksum"),
    "a digit": (change_tokens, "does not match its own checksum"),
    "a directory": (lambda path: ((path / "manifest.json").unlink(), (path / "manifest.json").mkdir()), "unreadable"),
    "another step's": (
        lambda path: (path / "manifest.json").write_text((path.parent / step_name(10) / "manifest.json").read_text()),
        "that of step 10",
    ),
    "outside": (point_outside, "outside of it"),
    "missing file": (lambda path: (path / SHARD).unlink(), f"{SHARD} is missing"),
    "truncated": (truncate, f"{SHARD} has 2399 bytes instead of 2400"),
    "flipped bit": (lambda path: flip_bit(path / SHARD, 1234), f"{SHARD} is damaged"),
    "flipped bit in the index": (lambda path: flip_bit(path / ".metadata", 3), ".metadata is damaged"),
}


def test_list_is_newest_first_and_ignores_the_rest(tmp_path):
    for step in (3, 100_000_000, 20):
        make(tmp_path, step)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    entries = list_checkpoints(tmp_path)
    assert [entry.step for entry in entries] == [100_000_000, 20, 3]
    assert all(entry.reason is None and verify(entry) is None for entry in entries)
    assert entries[1].checkpoint is not None
    assert entries[1].checkpoint.tokens == 20_000


def test_nothing_there(tmp_path):
    assert list_checkpoints(tmp_path / "none") == []
    assert newest_complete(tmp_path, say=print) is None
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file: checkpoints cannot be listed: Not a directory"):
        list_checkpoints(tmp_path / "file")
    with pytest.raises(InputError, match="a name like step-00000020"):
        inspect(tmp_path / "file")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_reason(tmp_path, damage):
    make(tmp_path, 10)
    change, reason = DAMAGES[damage]
    change(make(tmp_path, 20))
    said = []
    entry = newest_complete(tmp_path, say=said.append)
    assert entry is not None
    assert entry.step == 10
    assert len(said) == 1
    assert said[0].startswith("step-00000020 is skipped: ")
    assert reason in said[0]
    assert "\n" not in said[0]


def test_readers_share_the_work(tmp_path):
    path = make(tmp_path, 20)
    flip_bit(path / SHARD, 0)
    reasons = [verify(inspect(path), rank=rank, world=4) for rank in range(4)]
    assert [reason is None for reason in reasons] == [True, False, True, True]  # files: .metadata, __0_0, __1_0


def test_retention(tmp_path):
    for step in (10, 20, 30, 40, 50, 60):
        make(tmp_path, step)
    (tmp_path / step_name(60) / SHARD).unlink()  # newer than the newest complete one
    (tmp_path / step_name(30) / SHARD).unlink()  # older
    remove_old(tmp_path, keep=2)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [60, 50, 40]
    remove_old(tmp_path, keep=5)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [60, 50, 40]
    with pytest.raises(ValueError, match="keep 0"):
        remove_old(tmp_path, keep=0)


def test_retention_without_a_complete_one_removes_nothing(tmp_path):
    (make(tmp_path, 10) / SHARD).unlink()
    (make(tmp_path, 20) / SHARD).unlink()
    remove_old(tmp_path, keep=1)
    assert len(list_checkpoints(tmp_path)) == 2


def test_the_manifest_is_plain_json(tmp_path):
    content = json.loads((make(tmp_path, 20) / "manifest.json").read_text())
    assert content.pop("sha256")
    assert Checkpoint.load(content) == inspect(tmp_path / step_name(20)).checkpoint


def test_listing_needs_no_torch():
    code = "import sys, shardwise.checkpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
