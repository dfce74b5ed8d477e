"""Data: what `recipe.data` names, opened and checked."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.data.bins import has_bins, open_bins
from shardwise.data.index import FORMAT, INDEX, TOKEN_BYTES, DataIndex, Split, token_dtype
from shardwise.data.mixture import MixedOrder, MixedStream
from shardwise.data.order import Order
from shardwise.data.stream import Shard, TokenStream, map_array
from shardwise.data.tokenizer import CONTENT_FILES, Tokenizer, content_sha256, tokenizer_from
from shardwise.data.windows import Stream
from shardwise.spec import InputError

# Up to this size, opening hashes every shard (about a second); above it, sizes and types are checked, ids when read.
VERIFIED_BYTES = 1 << 30

TokenBytes = npt.NDArray[np.int32]


class Weighted(NamedTuple):
    """One source of a mixture."""

    name: str  # as the Run has it
    directory: Path
    weight: float


class Identity(NamedTuple):
    """Tokenizers with the same identity give the same ids for the same text."""

    kind: str
    vocabulary: int
    end_of_document: int
    sha256: str


@dataclass(frozen=True)
class Data:
    """Tokens to train on, from wherever they come."""

    name: str  # for messages
    fingerprint: str  # SHA-256 over what defines the tokens, wherever they lie
    train: Stream
    validation: Stream  # of 0 tokens where nothing was held out
    largest_id: int
    identity: Identity  # of the tokenizer
    load_tokenizer: Callable[[], Tokenizer]
    load_token_bytes: Callable[[], TokenBytes | None]
    index: DataIndex | None = None  # of what `prepare` wrote

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises InputError where it is not to be had."""
        return self.load_tokenizer()

    @functools.cached_property
    def token_bytes(self) -> TokenBytes | None:
        """[vocabulary]: the UTF-8 bytes of text that each id stands for, 0 for special tokens. None: unknown."""
        return self.load_token_bytes()

    def order(self, sequence: int, batch_sequences: int, seed: int) -> Order | MixedOrder:
        """The order of the training windows. Raises InputError where there is no target."""
        if isinstance(self.train, MixedStream):
            tokens = tuple(stream.tokens for stream in self.train.streams)
            return MixedOrder(tokens, self.train.weights, sequence, batch_sequences, seed)
        return Order(self.train.tokens, sequence, batch_sequences, seed)


def open_data(place: str | Path | Sequence[Weighted]) -> Data:
    """Open what `prepare` wrote, a directory of llm.c's token shards, or a mixture of such directories.

    Checks that every file has the size and type that it should have; what `prepare` wrote also by SHA-256 where the
    shards come to VERIFIED_BYTES or less. Raises InputError naming the file that is wrong.
    """
    if not isinstance(place, str | Path):
        return _mix(place)
    directory = Path(place)
    if not (directory / INDEX).exists() and has_bins(directory):
        return _open_bins(directory)
    return _open_prepared(directory)


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
    if data.largest_id >= vocabulary:
        raise InputError(
            f"{data.name}: the data holds token id {data.largest_id}; model.vocabulary is {vocabulary}; "
            f"it must be at least {data.largest_id + 1}"
        )


def _open_prepared(directory: Path) -> Data:
    index = read_index(directory)
    record = index.tokenizer
    dtype = token_dtype(record.vocabulary)

    def stream(split: Split) -> TokenStream:
        shards = [Shard(directory / file.name, file.tokens, file.bytes, dtype) for file in split.files]
        stream = TokenStream(shards)
        stream.check()
        return stream

    train, validation = stream(index.train), stream(index.validation)
    files = (*index.train.files, *index.validation.files)
    if sum(file.bytes for file in files) <= VERIFIED_BYTES:
        for file in files:
            _check_sha256(directory / file.name, file.sha256)
    _check_sha256(directory / TOKEN_BYTES, record.token_bytes_sha256)
    content = b""
    if record.kind != "bytes":
        content = _read_tokenizer(directory / CONTENT_FILES[record.kind], record.kind, record.sha256)
    sizes = map_array(directory / TOKEN_BYTES, np.dtype(np.int32), record.vocabulary)
    return Data(
        name=str(directory),
        fingerprint=index.fingerprint,
        train=train,
        validation=validation,
        largest_id=index.largest_id,
        identity=Identity(record.kind, record.vocabulary, record.end_of_document, record.sha256),
        load_tokenizer=lambda: tokenizer_from(record.kind, content, f"{directory}: its tokenizer"),
        load_token_bytes=lambda: np.array(sizes, dtype=np.int32),
        index=index,
    )


def _open_bins(directory: Path) -> Data:
    bins = open_bins(directory)
    found = bins.format

    def token_bytes() -> TokenBytes | None:
        tokenizer = bins.local_tokenizer()
        return tokenizer.token_bytes() if tokenizer else None

    return Data(
        name=str(directory),
        fingerprint=bins.fingerprint,
        train=TokenStream(bins.train),
        validation=TokenStream(bins.validation),
        largest_id=found.end_of_document,  # others may be larger, which is found when they are read
        identity=Identity(found.kind, found.vocabulary, found.end_of_document, found.sha256),
        load_tokenizer=bins.tokenizer,
        load_token_bytes=token_bytes,
    )


def _mix(sources: Sequence[Weighted]) -> Data:
    opened = [open_data(source.directory) for source in sources]
    if len(opened) == 1:
        return opened[0]
    first = opened[0]
    for number, data in enumerate(opened):
        if data.identity != first.identity:
            raise InputError(
                f"recipe.data.{number}: the tokens of {data.name} come from another tokenizer than those of "
                f"{first.name} ({_describe(data.identity)}; {_describe(first.identity)}); prepare both with the same"
            )
    weights = [Fraction(str(source.weight)) for source in sources]  # the decimal that was written, exactly
    shares = tuple(weight / sum(weights) for weight in weights)
    names = tuple(source.name for source in sources)
    parts = [[data.fingerprint, str(share)] for data, share in zip(opened, shares, strict=True)]

    def token_bytes() -> TokenBytes | None:
        return next((data.token_bytes for data in opened if data.token_bytes is not None), None)

    return Data(
        name=f"the mixture of {', '.join(names)}",
        fingerprint=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
        train=MixedStream(names, tuple(_single(data.train) for data in opened), shares),
        validation=MixedStream(names, tuple(_single(data.validation) for data in opened), shares),
        largest_id=max(data.largest_id for data in opened),
        identity=first.identity,
        load_tokenizer=lambda: first.tokenizer,
        load_token_bytes=token_bytes,
    )


def _single(stream: Stream) -> TokenStream:
    assert isinstance(stream, TokenStream)
    return stream


def _describe(identity: Identity) -> str:
    return f"{identity.kind}, {identity.vocabulary:,} ids, {identity.sha256[:8] or 'no table'}"


def _read_tokenizer(path: Path, kind: str, expected: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; restore it or prepare the data again") from None
    try:
        found = content_sha256(kind, content)
    except (ValueError, AttributeError):
        found = ""
    if found != expected:
        raise InputError(f"{path}: is corrupt: its SHA-256 differs from the index; restore it or prepare again")
    return content


def _check_sha256(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; restore it or prepare the data again") from None
    if digest != expected:
        raise InputError(f"{path}: is corrupt: its SHA-256 differs from the index; restore it or prepare again")
