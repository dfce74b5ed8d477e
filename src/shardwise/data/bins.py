"""Token shards of llm.c and modded-nanogpt, read as they are: 256 int32, then ids (llm.c, dev/data/data_common.py)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.data.index import TOKENIZER
from shardwise.data.stream import Shard
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.spec import InputError

_HEADER_BYTES = 1024
_HASHED_BYTES = 1 << 20  # of each end of a file

# What tiktoken names the files of its gpt2 in its cache: the SHA-1 of their addresses.
_GPT2_FILES = ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")


@dataclass(frozen=True)
class Format:
    """What the first number of a header stands for."""

    tokenizer: str  # for messages
    version: int
    dtype: np.dtype[np.unsignedinteger]
    vocabulary: int
    end_of_document: int  # stands before each document
    kind: str
    sha256: str


# What `prepare --tokenizer gpt2` writes down, so that its data can be mixed with such shards.
_GPT2_SHA256 = "e2871837fdeb43feac518c3f6271455a804a1f4cc5a7b53ed334ffcf80cb36db"

FORMATS = {
    20240520: Format(
        "GPT-2",
        1,
        np.dtype("<u2"),
        50257,
        50256,
        "tiktoken",
        "e2871837fdeb43feac518c3f6271455a804a1f4cc5a7b53ed334ffcf80cb36db",
    ),
    20240801: Format("Llama 3", 7, np.dtype("<u4"), 128256, 128000, "llama3", ""),
}


@dataclass(frozen=True)
class Bins:
    """A directory of such shards."""

    directory: Path
    format: Format
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    @property
    def fingerprint(self) -> str:
        """Over the names and sizes of all files, and the first and last MiB of each."""
        digest = hashlib.sha256()
        for shard in (*self.train, *self.validation):
            digest.update(json.dumps([shard.path.name, shard.bytes]).encode())
            digest.update(_ends(shard.path, shard.bytes))
        return digest.hexdigest()

    def local_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, where its file is on this machine: a tokenizer.json beside the shards, or for GPT-2 the cache
        of tiktoken. Raises InputError where the file is that of another."""
        if (self.directory / TOKENIZER).is_file():
            tokenizer = load_tokenizer(self.directory / TOKENIZER)
            if tokenizer.vocabulary != self.format.vocabulary:
                raise InputError(
                    f"{self.directory / TOKENIZER}: has {tokenizer.vocabulary:,} ids, but the .bin files beside it are "
                    f"{self.format.tokenizer}'s, which has {self.format.vocabulary:,}; replace or remove it"
                )
            return tokenizer
        return load_tokenizer("gpt2") if self.format.vocabulary == 50257 and _gpt2_is_cached() else None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, from wherever it can be had. Raises InputError."""
        if tokenizer := self.local_tokenizer():
            return tokenizer
        if self.format.vocabulary == 50257:
            return load_tokenizer("gpt2")
        raise InputError(f"{self.directory}: put {self.format.tokenizer}'s {TOKENIZER} beside the .bin files")


def has_bins(directory: Path) -> bool:
    """Whether the directory holds any `.bin` file."""
    return any(directory.glob("*.bin"))


def open_bins(directory: Path) -> Bins:
    """All `*train*.bin` and `*val*.bin` of a directory, by name. Raises InputError naming the file that is wrong."""
    splits: dict[str, list[Shard]] = {"train": [], "val": []}
    formats: dict[str, Format] = {}
    for path in sorted(directory.glob("*.bin")):
        roles = [role for role in splits if role in path.name]
        if len(roles) == 2:
            raise InputError(f"{path}: its name says both train and val; rename it")
        if roles:
            shard, formats[path.name] = _read_header(path)
            splits[roles[0]].append(shard)
    if not splits["train"]:
        raise InputError(f"{directory}: has .bin files, but none is named *train*.bin")
    first, *others = formats.items()
    for name, found in others:
        if found != first[1]:
            raise InputError(
                f"{directory}: {first[0]} holds {first[1].tokenizer}'s tokens and {name} {found.tokenizer}'s; "
                "one directory must have one kind"
            )
    return Bins(directory, first[1], tuple(splits["train"]), tuple(splits["val"]))


def _read_header(path: Path) -> tuple[Shard, Format]:
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(head) < _HEADER_BYTES:
        raise InputError(f"{path}: is truncated: {size:,} bytes, and the header alone has {_HEADER_BYTES:,}")
    magic, version, tokens = (int(word) for word in np.frombuffer(head, "<i4", 3))
    known = FORMATS.get(magic)
    if known is None:
        raise InputError(
            f"{path}: is not a token shard of llm.c: it starts with {magic}; expected: "
            + ", ".join(f"{number} ({found.tokenizer})" for number, found in FORMATS.items())
        )
    if version != known.version:
        raise InputError(f"{path}: has version {version}; {known.tokenizer}'s shards have {known.version}")
    expected = _HEADER_BYTES + tokens * known.dtype.itemsize
    if tokens < 1 or size != expected:
        what = "truncated" if size < expected else "too long"
        raise InputError(f"{path}: is {what}: {size:,} bytes; its header says {tokens:,} tokens, so {expected:,}")
    return Shard(path, tokens, size, known.dtype, _HEADER_BYTES), known


def _ends(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(_HASHED_BYTES)
            file.seek(max(len(head), size - _HASHED_BYTES))
            return head + file.read(_HASHED_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _gpt2_is_cached() -> bool:
    """Whether tiktoken finds its gpt2 without the network (tiktoken/load.py says where it looks)."""
    default = Path(tempfile.gettempdir()) / "data-gym-cache"
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", str(default)))
    return bool(cache) and all((Path(cache) / name).is_file() for name in _GPT2_FILES)
