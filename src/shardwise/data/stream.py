"""TokenStream: the shards of one split as one array of token ids."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.data.index import Split, token_dtype
from shardwise.spec import InputError

# Each mapping holds a file descriptor, and a process may often have 1,024 of them.
_MAPPED_SHARDS = 64


class TokenStream:
    """Token ids 0 … tokens − 1 of one split, memory-mapped; reads cross shard boundaries."""

    def __init__(self, directory: Path, split: Split, vocabulary: int) -> None:
        self.tokens = split.tokens
        self._directory, self._files, self._dtype = directory, split.files, token_dtype(vocabulary)
        self._ends = np.cumsum([file.tokens for file in split.files], dtype=np.int64)
        self._map = functools.lru_cache(maxsize=_MAPPED_SHARDS)(self._open)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
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
        return self._directory / self._files[shard].name, position - self._begin(shard)

    def check(self) -> None:
        """Raises InputError naming the first shard whose size, dtype or shape is not what the index says."""
        for shard in range(len(self._files)):
            self._open(shard)

    def _shard(self, position: int) -> int:
        return int(np.searchsorted(self._ends, position, side="right"))

    def _begin(self, shard: int) -> int:
        return int(self._ends[shard]) - self._files[shard].tokens

    def _open(self, shard: int) -> npt.NDArray[np.unsignedinteger]:
        file = self._files[shard]
        check_size(self._directory / file.name, file.bytes)
        return map_array(self._directory / file.name, self._dtype, file.tokens)


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
