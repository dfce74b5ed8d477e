"""Reading traces: which profiler wrote a file is told from its first bytes."""

from __future__ import annotations

import gc
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.profiling.kineto import parse_kineto
from shardwise.profiling.nsight import read_nsight
from shardwise.profiling.trace import Trace
from shardwise.spec import InputError

_SQLITE = b"SQLite format 3\x00"


def read_traces(paths: Iterable[str | Path]) -> list[Trace]:
    """All ranks of all files, by rank. Raises InputError naming the file: not there, not a trace, nothing in it, or
    a rank that stands in two of them."""
    traces = [trace for path in paths for trace in read_trace(Path(path))]
    if not traces:
        raise InputError("--trace: no file is given")
    seen: dict[int, str] = {}
    for trace in traces:
        if trace.rank in seen:
            raise InputError(
                f"{trace.source}: rank {trace.rank} stands in {seen[trace.rank]}, too; give each rank once"
            )
        seen[trace.rank] = trace.source
    return sorted(traces, key=lambda trace: trace.rank)


def read_trace(path: Path) -> list[Trace]:
    """The ranks of one file: one of PyTorch's profiler (.json, .json.gz), or an sqlite export of Nsight Systems."""
    try:
        with path.open("rb") as file:
            head = file.read(16)
        if head == _SQLITE:
            return read_nsight(path)
        content = gzip.decompress(path.read_bytes()) if head[:2] == b"\x1f\x8b" else path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"--trace {path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"--trace {path}: cannot be read: {error}") from None
    if head[:8].startswith(b"NSYS") or path.suffix == ".nsys-rep":
        raise InputError(f"--trace {path}: export it first: nsys export --type sqlite {path.name}")
    with _no_collection():
        return [parse_kineto(_json(content, path), str(path))]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Millions of new dictionaries, none of them garbage: collecting would take longer than parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _json(content: bytes, path: Path) -> Any:
    try:
        try:
            import orjson  # an optional extra, several times as fast
        except ImportError:
            return json.loads(content)
        return orjson.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"--trace {path}: not a trace of PyTorch's profiler (JSON), nor an sqlite export of Nsight Systems: {error}"
        ) from None
