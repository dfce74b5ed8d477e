"""DataIndex: what a prepared data directory holds. A directory without its index is not prepared data."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from shardwise.spec import Noun
from shardwise.spec.numbers import Count, CountOrZero, Fraction

FORMAT = 1
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
TIKTOKEN = "tiktoken.json"
TOKEN_BYTES = "token_bytes.npy"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TokenFile(Noun):
    """One shard: a one-dimensional `.npy` array of token ids."""

    # A plain name, so that an index can never lead out of its directory.
    name: Annotated[str, Field(pattern=r"^(train|validation)-\d{5,}\.npy$")]
    bytes: Count  # of the file
    tokens: Count
    text_bytes: CountOrZero  # UTF-8 bytes that its tokens stand for
    largest_id: CountOrZero
    sha256: Sha256  # of the file


class Split(Noun):
    """One side of the hold-out. Its files, one after the other, are one stream of tokens."""

    documents: CountOrZero
    text_bytes: CountOrZero  # of its documents; the files' sum differs where a tokenizer loses or adds text
    files: tuple[TokenFile, ...]

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)

    @property
    def bytes(self) -> int:
        """Of its files."""
        return sum(file.bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """Over the SHA-256 of its files, in order."""
        return hashlib.sha256("".join(file.sha256 for file in self.files).encode()).hexdigest()


class TokenizerRecord(Noun):
    """Which tokenizer made the ids."""

    kind: Literal["bytes", "huggingface", "tiktoken"]
    vocabulary: Count
    end_of_document: CountOrZero
    sha256: Sha256 | Literal[""]  # of its table; empty for bytes
    token_bytes_sha256: Sha256  # of token_bytes.npy


class Origin(Noun):
    """What was asked for: equal origins and tokenizers give equal data."""

    documents_sha256: Sha256  # over the SHA-256 of each document, in order; file names do not count
    validation_fraction: Fraction
    shard_tokens: Count


class DataIndex(Noun):
    """The content of index.json."""

    format: Literal[1]
    tokenizer: TokenizerRecord
    origin: Origin
    train: Split
    validation: Split

    @property
    def largest_id(self) -> int:
        return max(file.largest_id for file in (*self.train.files, *self.validation.files))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what defines the tokens. The same for the same tokens in any directory."""
        tokens = {
            "format": self.format,
            "tokenizer": self.tokenizer.dump(),
            "train": [[file.tokens, file.sha256] for file in self.train.files],
            "validation": [[file.tokens, file.sha256] for file in self.validation.files],
        }
        return hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest()


def token_dtype(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """How ids are stored: 2 bytes where they fit, else 4; little-endian on every machine."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
