"""The output directory: written beside its place, and renamed into it when it is complete."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A new directory beside `out`, removed with all that is in it unless `publish` moved it.

    OSErrors inside become UnwritableError.
    """
    out = real(out)
    staging = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"  # hidden, so that no source takes it for text
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
    except OSError as error:
        reason = error.strerror or error
        raise UnwritableError(f"{out}: cannot be written: {reason}; nothing was left there") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, out: Path, index: DataIndex) -> None:
    """Write the index and rename the directory into place; what another process put there meanwhile stays if it is
    the same data. Raises OSError, also where it is other data."""
    write_file(staging / INDEX, (json.dumps(index.dump(), indent=1) + "\n").encode())
    _sync_directory(staging)
    out = real(out)
    try:
        staging.rename(out)
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


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
