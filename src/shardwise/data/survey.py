"""The first pass over the source: which files are text, and what each document's hash and size are."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.data.documents import Document, NotText
from shardwise.spec import InputError
from shardwise.spec.numbers import human

_NAMED = 5  # left-out files that a message names


def content_key(digest: bytes) -> int:
    """The first 64 bits of a document's SHA-256."""
    return int.from_bytes(digest[:8], "big")


@dataclass(frozen=True)
class Survey:
    """What the first pass found; 16 bytes a document."""

    keys: npt.NDArray[np.uint64]  # [documents]: content_key of each
    sizes: npt.NDArray[np.uint64]  # [documents]: bytes
    left_out: frozenset[int]  # ordinals among all files
    sha256: str  # over the documents' own

    @property
    def text_bytes(self) -> int:
        return int(self.sizes.sum())

    def kept(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents without those that are left out."""
        return (document for ordinal, document in enumerate(documents) if ordinal not in self.left_out)


def take_survey(documents: Iterable[Document], say: Callable[[str], None]) -> Survey:
    """Read every document once. Raises InputError where none is text."""
    keys, sizes = array("Q"), array("Q")
    left_out: set[int] = set()
    named: list[str] = []
    binary = 0
    total = hashlib.sha256()
    for ordinal, document in enumerate(documents):
        digest, size = hashlib.sha256(), 0
        try:
            for piece in document.pieces():
                digest.update(piece)
                size += len(piece)
        except NotText as error:
            binary += 1
            if binary <= _NAMED:
                named.append(f"{document.name} ({error})")
            left_out.add(ordinal)
            continue
        if not size:
            left_out.add(ordinal)
            continue
        keys.append(content_key(digest.digest()))
        sizes.append(size)
        total.update(digest.digest())

    notes = []
    if len(left_out) > binary:
        notes.append(f"{len(left_out) - binary} empty")
    if binary:
        notes.append(f"{binary} not text: {', '.join(named)}{', …' if binary > _NAMED else ''}")
    if not keys:
        raise InputError(f"{documents}: holds no text" + (f"; left out: {'; '.join(notes)}" if notes else ""))
    if notes:
        say(f"left out: {'; '.join(notes)}")
    say(f"found {len(keys):,} documents, {human(sum(sizes))} bytes of text")
    return Survey(np.array(keys), np.array(sizes), frozenset(left_out), total.hexdigest())
