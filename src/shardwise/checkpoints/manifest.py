"""The manifest decides what a checkpoint is. No torch.

`DIRECTORY/step-00000020/` holds the shards and, written last of all, `manifest.json`: a Checkpoint, with the size and
sha256 of every file. A directory without a valid manifest is not a checkpoint, whatever else is in it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.spec import Checkpoint, CheckpointFile, InputError

MANIFEST = "manifest.json"
_SEAL = "sha256"  # of the manifest's own content: a flipped digit in `tokens` must not pass


@dataclass(frozen=True, slots=True)
class Entry:
    """One `step-N` directory. `reason` says why it cannot be used; None where every file is there in full size."""

    step: int
    path: Path
    checkpoint: Checkpoint | None
    reason: str | None


def step_name(step: int) -> str:
    """Name of the directory of a step: 'step-00000020'."""
    return f"step-{step:08d}"


def list_checkpoints(directory: Path) -> list[Entry]:
    """All `step-N` directories, newest first; empty where there is no such directory.

    Sizes are checked, contents are not (`verify` does that). Raises InputError where `directory` cannot be read.
    """
    try:
        paths = [path for path in directory.iterdir() if _step_of(path) is not None and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{directory}: checkpoints cannot be listed: {error.strerror}") from None
    return sorted((inspect(path) for path in paths), key=lambda entry: entry.step, reverse=True)


def inspect(path: Path) -> Entry:
    """Read the manifest of one directory and check that its files exist in full size.

    Raises InputError where the directory is not named as a checkpoint is.
    """
    step = _step_of(path)
    if step is None:
        raise InputError(f"{path}: a checkpoint is a directory with a name like {step_name(20)}")
    try:
        checkpoint = _read(path / MANIFEST)
    except FileNotFoundError:
        return Entry(step, path, None, "it has no manifest, so its save never finished")
    except OSError as error:
        return Entry(step, path, None, f"its manifest is unreadable: {error.strerror}")
    except (ValueError, RecursionError) as error:
        return Entry(step, path, None, f"its manifest is unreadable: {' '.join(str(error).split())}")
    return Entry(step, path, checkpoint, _incomplete(step, path, checkpoint))


def verify(entry: Entry, *, rank: int = 0, world: int = 1) -> str | None:
    """Compare the sha256 of every file with the manifest; return what is wrong, or None.

    With `world` readers, reader `rank` takes every world-th file, so that the ranks of a run can share the work.
    """
    if entry.reason or entry.checkpoint is None:
        return entry.reason

    def wrong(file: CheckpointFile) -> str | None:
        try:
            intact = describe_file(entry.path / file.name) == file
        except OSError as error:
            return f"{file.name} is unreadable: {error.strerror}"
        return None if intact else f"{file.name} is damaged: its content is not what was saved"

    with ThreadPoolExecutor(max_workers=4) as readers:  # hashing releases the interpreter lock
        return next(filter(None, readers.map(wrong, entry.checkpoint.files[rank::world])), None)


def newest_complete(
    directory: Path, *, say: Callable[[str], None], check: Callable[[Entry], str | None] = verify
) -> Entry | None:
    """The newest checkpoint that is complete and passes `check`, or None. Tells `say` each one it skipped, and why."""
    return choose(list_checkpoints(directory), say=say, check=check)


def choose(entries: list[Entry], *, say: Callable[[str], None], check: Callable[[Entry], str | None]) -> Entry | None:
    """The first of `entries` that is complete and passes `check`, or None."""
    for entry in entries:
        reason = entry.reason or check(entry)
        if reason is None:
            return entry
        say(f"{entry.path.name} is skipped: {reason}")
    return None


def remove_old(directory: Path, keep: int) -> None:
    """Keep the newest `keep` complete checkpoints; of what is older than the newest complete one, remove the rest.

    An incomplete directory newer than every complete one stays: it may be in the making. Raises ValueError for keep < 1
    and OSError where something cannot be removed.
    """
    if keep < 1:
        raise ValueError(f"keep {keep} would delete every checkpoint; nearest: 1")
    entries = list_checkpoints(directory)
    complete = [entry for entry in entries if entry.reason is None]
    if not complete:
        return
    for entry in entries:
        if entry.step < complete[0].step and entry not in complete[:keep]:
            remove(entry.path)


def remove(path: Path) -> None:
    """Delete one checkpoint, manifest first: killed half-way, what remains is not a checkpoint. Raises OSError."""
    (path / MANIFEST).unlink(missing_ok=True)
    sync_directory(path)
    shutil.rmtree(path)


def describe_file(path: Path) -> CheckpointFile:
    """Name, size and sha256 of a file as it is on disk. Raises OSError."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return CheckpointFile(name=path.name, bytes=stream.tell(), sha256=digest)


def write_manifest(path: Path, checkpoint: Checkpoint) -> None:
    """Commit: from the moment this returns, the directory is a checkpoint, also after a power cut. Raises OSError."""
    content = checkpoint.dump()
    temporary = path / (MANIFEST + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump({**content, _SEAL: _seal(content)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    sync_directory(path)  # the shards' names must be on disk before the manifest's is
    temporary.replace(path / MANIFEST)
    sync_directory(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Some network file systems cannot, and say so with EINVAL."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _read(path: Path) -> Checkpoint:
    """Raises OSError, or ValueError (InputError among them) where the content is not a sealed Checkpoint."""
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError("it is empty")
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop(_SEAL, None) != _seal(content):
        raise ValueError("it does not match its own checksum")
    return Checkpoint.load(content)


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d{8,})", path.name)
    step = int(match[1]) if match else -1
    return step if path.name == step_name(step) else None


def _incomplete(step: int, path: Path, checkpoint: Checkpoint) -> str | None:
    if checkpoint.step != step:
        return f"its manifest is that of step {checkpoint.step}"
    if not checkpoint.files:
        return "its manifest lists no files"
    for file in checkpoint.files:
        if Path(file.name).name != file.name:
            return f"its manifest names a file outside of it: {file.name}"
        try:
            size = (path / file.name).stat().st_size
        except FileNotFoundError:
            return f"{file.name} is missing"
        except OSError as error:
            return f"{file.name} is unreadable: {error.strerror}"
        if size != file.bytes:
            return f"{file.name} has {size} bytes instead of {file.bytes}"
    return None
