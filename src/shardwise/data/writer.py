"""ShardWriter: token ids to `.npy` shards as they come, at a few kilobytes of memory whatever the shard's size."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.data.index import TokenFile, token_dtype


class ShardWriter:
    """Writes one split. Every shard is full but the last; a document may straddle shards."""

    def __init__(
        self,
        directory: Path,
        split: str,
        token_bytes: npt.NDArray[np.int32],
        shard_tokens: int,
        wrote: Callable[[TokenFile], None],
    ) -> None:
        self.files: list[TokenFile] = []
        self._directory, self._split, self._wrote = directory, split, wrote
        self._token_bytes, self._shard_tokens = token_bytes, shard_tokens
        self._dtype = token_dtype(len(token_bytes))
        self._file: io.BufferedRandom | None = None
        self._tokens = self._text_bytes = self._largest_id = 0

    def append(self, ids: npt.NDArray[np.int64]) -> None:
        """Raises OSError where the disk does."""
        while ids.size:
            if self._file is None:
                self._file = self._path.open("w+b")
                self._write_header(self._shard_tokens)
            part, ids = np.split(ids, [self._shard_tokens - self._tokens])
            self._file.write(part.astype(self._dtype).tobytes())
            self._tokens += part.size
            self._text_bytes += int(self._token_bytes[part].sum(dtype=np.int64))
            self._largest_id = max(self._largest_id, int(part.max()))
            if self._tokens == self._shard_tokens:
                self._finish()

    def close(self) -> tuple[TokenFile, ...]:
        """Finish the last shard and return all of them. Raises OSError where the disk does."""
        if self._file is not None:
            self._finish()
        return tuple(self.files)

    def abandon(self) -> None:
        """Let go of a shard that will not be finished."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._split}-{len(self.files):05d}.npy"

    def _write_header(self, tokens: int) -> None:
        assert self._file is not None
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)  # padded: as long for any number of tokens

    def _finish(self) -> None:
        assert self._file is not None
        if self._tokens < self._shard_tokens:
            self._file.seek(0)
            self._write_header(self._tokens)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        size = self._file.tell()
        self._file.close()
        file = TokenFile(
            name=self._path.name,
            bytes=size,
            tokens=self._tokens,
            text_bytes=self._text_bytes,
            largest_id=self._largest_id,
            sha256=digest,
        )
        self.files.append(file)
        self._file = None
        self._tokens = self._text_bytes = self._largest_id = 0
        self._wrote(file)
