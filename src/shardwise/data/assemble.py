"""From the tokens of pieces to shards: which documents go where, and each shard written by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.data.encode import ENDS, Setup, Tick, read_table, sync
from shardwise.data.index import Split, TokenFile, token_dtype
from shardwise.data.survey import Survey
from shardwise.spec import InputError

SPLITS = ("train", "validation")
_LEFT_OUT = 2
_BLOCK = 1 << 20  # tokens that are copied at once


@dataclass(frozen=True)
class Part:
    """Tokens start … stop − 1 of those that a piece has for one split. `sides` has a byte for each row of the piece."""

    piece: str
    sides: bytes
    start: int
    stop: int


@dataclass
class Shard:
    """A shard that is to be written."""

    split: int
    number: int
    tokens: int = 0
    parts: list[Part] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{SPLITS[self.split]}-{self.number:05d}.npy"


@dataclass
class Layout:
    """All shards of both splits. Every shard is full but a split's last; a document may straddle shards."""

    shards: list[Shard] = field(default_factory=list)
    documents: list[int] = field(default_factory=lambda: [0, 0])
    text_bytes: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def name(self) -> str:
        """The same for the same tokens in the same shards."""
        digest = hashlib.sha256()
        for shard in self.shards:
            for part in shard.parts:
                digest.update(f"{shard.name} {part.piece} {part.start} {part.stop} ".encode() + part.sides)
        return digest.hexdigest()[:32]


def lay_out(
    names: Iterable[str],
    setup: Setup,
    survey: Survey,
    held: npt.NDArray[np.bool_],
    tail: int | None,
    shard_tokens: int,
) -> Layout:
    """Documents that are `held` [documents] go into validation; where `tail` is given, instead, what follows that byte
    of every document does."""
    layout = Layout()
    last: list[Shard | None] = [None, None]
    documents = 0
    for name in names:
        rows, _ = read_table(setup, name)
        starts = rows["begin"] == 0
        ordinals = documents + np.cumsum(starts) - 1
        documents += int(starts.sum())
        sides = (held[ordinals] if tail is None else rows["begin"] >= tail).astype(np.uint8)
        sides[~survey.kept[ordinals]] = _LEFT_OUT
        for split in range(len(SPLITS)):
            mine = rows[sides == split]
            layout.documents[split] += int((mine["flags"] & ENDS).sum())
            layout.text_bytes[split] += int(mine["size"].sum())
            start, stop = 0, int(mine["tokens"].sum())
            while start < stop:
                shard = last[split]
                if shard is None or shard.tokens == shard_tokens:
                    shard = last[split] = Shard(split, shard.number + 1 if shard else 0)
                    layout.shards.append(shard)
                end = min(stop, start + shard_tokens - shard.tokens)
                shard.parts.append(Part(name, sides.tobytes(), start, end))
                shard.tokens += end - start
                start = end
    return layout


def write_shard(shard: Shard, directory: Path, setup: Setup, tick: Tick) -> None:
    """Write the shard into `directory`, then its TokenFile beside that directory. Raises OSError."""
    assert setup.tokenizer
    path, dtype = directory / shard.name, token_dtype(setup.tokenizer.vocabulary)
    text_bytes = largest = 0
    with path.open("w+b") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": (shard.tokens,)}
        np.lib.format.write_array_header_1_0(file, header)
        for ids in (ids for part in shard.parts for ids in _tokens(part, shard.split, setup, dtype)):
            file.write(ids.tobytes())
            text_bytes += int(setup.token_bytes[ids].sum(dtype=np.int64))
            largest = max(largest, int(ids.max()))
            tick(len(ids), 0)
        sync(file)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    record = TokenFile(
        name=shard.name,
        bytes=size,
        tokens=shard.tokens,
        text_bytes=text_bytes,
        largest_id=largest,
        sha256=digest,
    )
    temporary = _record(shard, directory).with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(json.dumps(record.dump()).encode())
        sync(file)
    temporary.replace(_record(shard, directory))


def is_finished(shard: Shard, directory: Path) -> bool:
    """Whether `write_shard` wrote it earlier."""
    return _record(shard, directory).is_file()


def read_splits(layout: Layout, directory: Path) -> tuple[Split, Split]:
    """The splits, once every shard is written."""
    files: tuple[list[TokenFile], list[TokenFile]] = [], []
    for shard in layout.shards:
        files[shard.split].append(TokenFile.load(json.loads(_record(shard, directory).read_bytes())))
    train, validation = (
        Split(documents=layout.documents[side], text_bytes=layout.text_bytes[side], files=tuple(files[side]))
        for side in (0, 1)
    )
    return train, validation


def _record(shard: Shard, directory: Path) -> Path:
    return directory.parent / f"{directory.name}-{shard.name}.json"


def _tokens(
    part: Part, split: int, setup: Setup, dtype: np.dtype[np.unsignedinteger]
) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """In blocks, since a piece can be a whole compressed file."""
    rows, _ = read_table(setup, part.piece)
    path, ends = setup.tokens(part.piece), np.cumsum(rows["tokens"], dtype=np.int64)
    if path.stat().st_size != ends[-1] * dtype.itemsize:
        raise InputError(f"{path}: is damaged; remove {setup.work} and prepare again")
    ids = np.memmap(path, dtype, "r")
    mine = np.frombuffer(part.sides, np.uint8) == split
    edges = np.flatnonzero(np.diff(mine, prepend=False, append=False)).reshape(-1, 2)  # runs of rows: first, last + 1
    done = 0  # tokens of the runs before
    for first, last in edges:
        begin, end = int(ends[first - 1]) if first else 0, int(ends[last - 1])
        start, stop = max(begin, begin + part.start - done), min(end, begin + part.stop - done)
        for block in range(start, stop, _BLOCK):
            yield ids[block : min(stop, block + _BLOCK)]
        done += end - begin
