"""Files of a source: recognised by name, checked by their first bytes, read through their compression."""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib.util
import io
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from shardwise.data.documents import BadRecord
from shardwise.spec import InputError

Kind = Literal["text", "jsonl", "parquet", "dataset"]
Compression = Literal["", "gzip", "zstd"]

_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_PACKAGES = {"parquet": ("pyarrow", "parquet"), "zstd": ("zstandard", "zstd")}
_ZSTD_BLOCK = 1024  # compressed bytes that are decoded at once: at most 32 MiB of text


@dataclass(frozen=True)
class File:
    """One file as it was found. Its size and time of change (nanoseconds) tell whether it is still the same."""

    name: str  # below its source, for messages
    path: str
    kind: Kind
    compression: Compression
    size: int
    changed: int


def expand(source: str) -> Iterator[Path]:
    """The paths that a SOURCE names: itself, or all that a pattern matches, sorted. Raises InputError."""
    if os.path.lexists(source) or not glob.has_magic(source):
        yield Path(source)
        return
    found = sorted(glob.glob(source, recursive=True))  # noqa: PTH207  Path.glob takes no absolute pattern
    if not found:
        raise InputError(f"{source}: nothing matches this pattern")
    yield from map(Path, found)


def find_file(path: Path, name: str) -> File:
    """Raises OSError."""
    plain = Path(path.name.lower())
    compression = _COMPRESSIONS.get(plain.suffix, "")
    inner = Path(plain.stem).suffix if compression else plain.suffix
    kind = _KINDS.get(inner, "text")
    if compression and inner == ".json":  # JSON lines by custom; a plain .json is a text like any other
        kind = "jsonl"
    status = path.stat()
    printable = name.encode(errors="replace").decode()  # a name that is not UTF-8 can still be printed
    return File(printable, str(path), kind, compression, status.st_size, status.st_mtime_ns)


def missing_package(package: str, extra: str) -> str:
    """What to install, where a package is not there; else nothing."""
    if importlib.util.find_spec(package):
        return ""
    return f"needs a package that is not installed: pip install 'shardwise[{extra}]'"


def require_same(file: File) -> None:
    """Raises InputError where the file is no longer the one that was found, OSError where it is gone."""
    status = Path(file.path).stat()
    if (status.st_size, status.st_mtime_ns) != (file.size, file.changed):
        raise InputError(f"{file.path}: changed while it was being read; prepare again")


def read_head(file: File, size: int) -> bytes:
    """The file's first bytes as they lie on the disk. Raises InputError."""
    try:
        with Path(file.path).open("rb") as raw:
            return raw.read(size)
    except OSError as error:
        raise InputError(f"{file.path}: cannot be read: {error.strerror}") from None


def check_format(file: File) -> None:
    """Whether the first bytes are what the name says. Raises BadRecord; InputError where a package is missing."""
    wanted = "parquet" if file.kind == "parquet" else file.compression
    if wanted in _PACKAGES and (missing := missing_package(*_PACKAGES[wanted])):
        raise InputError(f"{file.path}: {missing}")
    if file.kind == "parquet" and file.compression:
        raise BadRecord(f"Parquet is compressed inside, and is not read through {file.compression}; decompress it")
    if file.kind == "text" and not file.compression:
        return
    head = read_head(file, 4)
    found = _format_of(head)
    if found != wanted or (wanted and not head):
        what = f"is {found}" if found else f"starts with {head!r}" if head else "is empty"
        raise BadRecord(f"its name says {wanted or 'JSON lines'}, but the file {what}")


@contextlib.contextmanager
def opened(file: File) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The file's uncompressed bytes, and how many bytes of the file itself have been read by now.

    Raises BadRecord where it is damaged, InputError where it cannot be read or has changed since it was found.
    """
    try:
        with Path(file.path).open("rb") as raw:
            require_same(file)
            yield _decompress(file, raw), raw.tell
            require_same(file)
    except EOFError:
        raise BadRecord(f"its {file.compression} data is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadRecord(f"its gzip data is damaged: {error}") from None
    except OSError as error:
        raise InputError(f"{file.path}: cannot be read: {error.strerror}") from None


def _format_of(head: bytes) -> str:
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    skippable = head[1:] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50
    if head == b"\x28\xb5\x2f\xfd" or skippable:
        return "zstd"
    return "parquet" if head == b"PAR1" else ""


def _decompress(file: File, raw: BinaryIO) -> BinaryIO:
    if file.compression == "gzip":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if file.compression == "zstd":
        return io.BufferedReader(_Zstd(raw), 1 << 17)
    return raw


class _Zstd(io.RawIOBase):
    """Reads zstd frames one after the other. The package's own reader would not notice that the last is truncated;
    this one raises EOFError."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        self._raw, self._error = raw, zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            block = self._input or self._raw.read(_ZSTD_BLOCK)
            if not block:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._output = memoryview(self._frame.decompress(block))
            except self._error as error:
                raise BadRecord(f"its zstd data is damaged: {error}") from None
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size
