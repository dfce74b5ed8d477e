"""Rows of a Hugging Face data set: from the Hub, or from a directory that `save_to_disk` wrote."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.data.documents import Document, Options, record_chunks
from shardwise.data.files import missing_package
from shardwise.spec import InputError
from shardwise.spec.noun import nearest

HUB = "hf:"
_BATCH = 256  # rows that are read at once


@dataclass(frozen=True)
class Rows:
    """A loaded data set, of which each row is a document."""

    name: str
    dataset: Any  # datasets.Dataset: on disk, memory-mapped

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def bytes(self) -> int:
        """Of the whole table; only divides the work and shows progress."""
        return int(self.dataset.data.nbytes)

    @property
    def content(self) -> int:
        """Changes with the content."""
        return int(hashlib.sha256(str(self.dataset._fingerprint).encode()).hexdigest()[:15], 16)


def is_saved(directory: Path) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    saved = (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    return saved or (directory / "dataset_dict.json").is_file()


def load_rows(place: str) -> Rows:
    """`hf:NAME[:CONFIG][@SPLIT]`, or a saved directory. Of several splits without a word, `train` is meant.

    Raises InputError.
    """
    if missing := missing_package("datasets", "datasets"):
        raise InputError(f"{place}: {missing}")
    import datasets

    try:
        if place.startswith(HUB):
            name, _, split = place.removeprefix(HUB).partition("@")
            name, _, config = name.partition(":")
            loaded = datasets.load_dataset(name, config or None, split=split or None)
        else:
            loaded = datasets.load_from_disk(place)
    except Exception as error:  # the library raises whatever its many parts raise
        raise InputError(f"{place}: cannot be loaded: {_reason(error)}") from None
    if isinstance(loaded, dict):  # the library's DatasetDict
        splits = sorted(loaded)
        if len(splits) > 1 and "train" not in splits:
            example = f"{place}@{splits[0]}" if place.startswith(HUB) else f"{place}/{splits[0]}"
            raise InputError(f"{place}: has the splits {', '.join(splits)}; name one of them, such as {example}")
        loaded = loaded["train" if "train" in splits else splits[0]]
    return Rows(place, loaded)


def check_column(rows: Rows, column: str) -> None:
    """Raises InputError where the data set has no such column."""
    names = rows.dataset.column_names
    if column not in names:
        near = nearest(column, names)
        hint = f"did you mean '{near}'? " if near else ""
        raise InputError(f"{rows.name}: has no column '{column}'; {hint}It has: {', '.join(names)}")


def row_spans(rows: Rows, options: Options) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about a piece each."""
    count = len(rows)
    step = max(1, count * options.piece_bytes // max(1, rows.bytes))
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def read_rows(rows: Rows, begin: int, end: int, options: Options) -> Iterator[Document]:
    """One document for each row, numbered within the data set; None is an empty one."""
    column = rows.dataset.select_columns([options.text_field])
    for first in range(begin, end, _BATCH):
        texts = column[first : min(first + _BATCH, end)][options.text_field]
        for number, text in enumerate(texts, start=first + 1):
            share = (number - begin) / (end - begin)
            yield Document(rows.name, record_chunks(text, options), number, progress=functools.partial(float, share))


def _reason(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, ConnectionError) or any(word in type(error).__name__ for word in ("Connect", "Offline")):
        return f"the Hugging Face Hub cannot be reached ({text})"
    return text
