"""Streams: the shards of one split as one array of token ids."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.spec import InputError

Ids = npt.NDArray[np.int64]

# Each mapping holds a file descriptor, and a process may often have 1,024 of them.
_MAPPED_SHARDS = 64


@dataclass(frozen=True)
class Shard:
    """One file of token ids: a one-dimensional `.npy`, or where `header` is given, so many bytes and then raw ids."""

    path: Path
    tokens: int
    bytes: int
    dtype: np.dtype[np.unsignedinteger]
    header: int = 0

    def map(self) -> npt.NDArray[np.unsignedinteger]:
        """[tokens], memory-mapped. Raises InputError where the file is not what is expected."""
        check_size(self.path, self.bytes)
        if not self.header:
            return map_array(self.path, self.dtype, self.tokens)
        try:
            return np.memmap(self.path, self.dtype, "r", offset=self.header, shape=(self.tokens,))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path}: cannot be read: {error}") from None


class TokenStream:
    """Token ids 0 … tokens − 1 of one split; reads cross shard boundaries."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = tuple(shards)
        self._ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)
        self.tokens = int(self._ends[-1]) if shards else 0
        self._map = functools.lru_cache(maxsize=_MAPPED_SHARDS)(lambda shard: self._shards[shard].map())

    def read(self, start: int, stop: int) -> Ids:
        """[stop − start] ids. Raises IndexError outside the stream, InputError where a shard cannot be read."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.tokens}")
        ids = np.empty(stop - start, dtype=np.int64)
        shard = self._shard(start)
        position = start
        while position < stop:
            offset = position - self._begin(shard)
            part = self._map(shard)[offset : offset + stop - position]
            ids[position - start : position - start + len(part)] = part
            position += len(part)
            shard += 1
        return ids

    def locate(self, position: int) -> tuple[Path, int]:
        """The shard that holds a token of the stream, and the token's place in it."""
        shard = self._shard(position)
        return self._shards[shard].path, position - self._begin(shard)

    def check(self) -> None:
        """Raises InputError naming the first shard that is not what is expected."""
        for shard in self._shards:
            shard.map()

    def _shard(self, position: int) -> int:
        return int(np.searchsorted(self._ends, position, side="right"))

    def _begin(self, shard: int) -> int:
        return int(self._ends[shard]) - self._shards[shard].tokens


def check_size(path: Path, expected: int) -> None:
    """Raises InputError where the file is missing or has another size."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; restore it or prepare the data again") from None
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise InputError(f"{path}: is {what}: {size:,} bytes, {expected:,} in the index; restore it or prepare again")


def map_array(path: Path, dtype: np.dtype[np.generic], length: int) -> npt.NDArray[np.unsignedinteger]:
    """A one-dimensional `.npy` of exactly this type and length, memory-mapped. Raises InputError."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: is not a readable .npy array: {error}; restore it or prepare again") from None
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (length,):
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        raise InputError(f"{path}: holds {found}, the index says {dtype} [{length}]; restore it or prepare again")
    return array
