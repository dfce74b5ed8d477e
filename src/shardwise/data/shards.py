"""Data: a prepared directory, opened and checked."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.data.index import FORMAT, INDEX, TOKEN_BYTES, TOKENIZER, DataIndex
from shardwise.data.stream import TokenStream, map_array
from shardwise.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from shardwise.spec import InputError

# Up to this size, opening hashes every shard (about a second); above it, sizes and types are checked, ids when read.
VERIFIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Data:
    """Prepared data. `token_bytes` [vocabulary]: the UTF-8 bytes each id stands for, 0 for special tokens."""

    directory: Path
    index: DataIndex
    train: TokenStream
    validation: TokenStream  # of 0 tokens where nothing was held out
    token_bytes: npt.NDArray[np.int32]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what defines the tokens, wherever they lie."""
        return self.index.fingerprint

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        if self.index.tokenizer.kind == "bytes":
            return ByteTokenizer()
        return HuggingFaceTokenizer(self.directory / TOKENIZER)


def open_data(directory: str | Path) -> Data:
    """Open what `prepare` wrote.

    Checks that every file has the size and type that the index says, and its SHA-256 too where the shards come to
    VERIFIED_BYTES or less. Raises InputError naming the file that is wrong.
    """
    directory = Path(directory)
    index = read_index(directory)
    tokenizer = index.tokenizer
    train = TokenStream(directory, index.train, tokenizer.vocabulary)
    validation = TokenStream(directory, index.validation, tokenizer.vocabulary)
    train.check()
    validation.check()
    files = (*index.train.files, *index.validation.files)
    if sum(file.bytes for file in files) <= VERIFIED_BYTES:
        for file in files:
            _check_sha256(directory / file.name, file.sha256)
    _check_sha256(directory / TOKEN_BYTES, tokenizer.token_bytes_sha256)
    if tokenizer.kind == "huggingface":
        _check_sha256(directory / TOKENIZER, tokenizer.sha256)
    token_bytes = map_array(directory / TOKEN_BYTES, np.dtype(np.int32), tokenizer.vocabulary)
    return Data(directory, index, train, validation, np.array(token_bytes, dtype=np.int32))


def read_index(directory: Path) -> DataIndex:
    """The directory's index.json alone. Raises InputError."""
    path = directory / INDEX
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "is not prepared data: it has no index.json" if directory.is_dir() else "no such directory"
        raise InputError(f"{directory}: {what}; write it with `shardwise data prepare`") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON: {error}; prepare the data again") from None
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise InputError(f"{path}: has format {version!r}, and this version reads {FORMAT}; prepare the data again")
    index = DataIndex.load(content, str(path))
    if not index.train.files:
        raise InputError(f"{path}: train has no tokens; prepare the data again")
    return index


def check_vocabulary(data: Data, vocabulary: int) -> None:
    """Raises InputError where the data holds an id that a model of this vocabulary cannot embed."""
    largest = data.index.largest_id
    if largest >= vocabulary:
        raise InputError(
            f"{data.directory}: the data holds token id {largest}; model.vocabulary is {vocabulary}; "
            f"it must be at least {largest + 1}"
        )


def _check_sha256(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; restore it or prepare the data again") from None
    if digest != expected:
        raise InputError(f"{path}: is corrupt: its SHA-256 differs from the index; restore it or prepare again")
