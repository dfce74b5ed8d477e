"""The output directory: written beside its place, and renamed into it when it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from shardwise.data.index import INDEX, DataIndex
from shardwise.data.shards import read_index
from shardwise.spec import InputError


class UnwritableError(InputError):
    """The output directory cannot be written, or its disk is full."""


def real(path: Path) -> Path:
    """The path without links. Unlike Path.resolve, it does not raise on a loop."""
    return Path(os.path.realpath(path))


def existing_index(out: Path) -> DataIndex | None:
    """The index at `out`; None where the place is free. Raises InputError where something else is there."""
    try:
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return None
        prepared = (out / INDEX).is_file()
    except OSError as error:
        raise UnwritableError(f"{out}: cannot be written: {error.strerror}") from None
    if not prepared:
        raise InputError(f"{out}: exists and is not prepared data; choose another directory or remove it")
    return read_index(out)


def work_directory(out: Path, unique: str = "") -> Path:
    """Beside `out`, and hidden, so that no source takes it for text."""
    out = real(out)
    return out.parent / f".{out.name}{unique}.partial"


@contextlib.contextmanager
def workspace(out: Path, *, resumable: bool, say: Callable[[str], None]) -> Iterator[Path]:
    """A directory beside `out` for everything that is not finished.

    A resumable one is the same each time, is used by one process at a time, and stays where an exception ends the block
    after some text was turned into tokens; in every other case it is removed. OSErrors inside become UnwritableError.
    """
    work = work_directory(out, "" if resumable else f".{uuid.uuid4().hex[:8]}")
    kept = False
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=resumable)
        with (work / "lock").open("wb") as lock:
            _take(lock, out)
            try:
                yield work
            except BaseException:
                kept = resumable and any(path.stat().st_size for path in work.glob("*.tokens"))
                raise
            finally:
                if not kept:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise UnwritableError(
            f"{out}: cannot be written: {reason}" + ("" if kept else "; nothing was left there")
        ) from None
    finally:
        if kept:
            say(f"what is finished is kept in {work}, and is continued by the same command")


def publish(directory: Path, out: Path, index: DataIndex) -> None:
    """Write the index and rename the directory into place; what another process put there meanwhile stays if it is
    the same data. Raises OSError, also where it is other data."""
    write_file(directory / INDEX, (json.dumps(index.dump(), indent=1) + "\n").encode())
    _sync_directory(directory)
    out = real(out)
    try:
        directory.rename(out)
    except OSError:
        if existing_index(out) != index:
            raise
    _sync_directory(out.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write and sync. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _take(lock: BinaryIO, out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{out}: another process is preparing data there") from None
    except OSError:  # a file system without locks
        pass


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
