"""One piece of the sources to its tokens and a row for each of its documents: two files that are whole or absent."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardwise.data.documents import BadRecord, Document, NotText, Options
from shardwise.data.hub import Rows
from shardwise.data.index import token_dtype
from shardwise.data.pieces import Piece, Span, locate, read_span
from shardwise.data.tokenizer import Tokenizer
from shardwise.spec import InputError

# A document, or a part of one: a row with begin > 0 goes on where the row before it ended.
ROW = np.dtype([("sha256", "V32"), ("begin", "<u8"), ("size", "<u8"), ("tokens", "<u8"), ("flags", "u1")])
ENDS = 1  # the last of its tokens is the end of a document
BAD = 2  # all of the document is left out

NAMED = 5  # documents that a message names
_TICK_SECONDS = 0.2

Table = npt.NDArray[Any]  # rows of ROW
Tick = Callable[[int, int], None]  # bytes of the sources (or tokens) and documents that were done since the last


@dataclass(frozen=True)
class Setup:
    """What every worker needs. Without a tokenizer, documents are only hashed."""

    work: Path
    options: Options
    tokenizer: Tokenizer | None
    rows: dict[str, Rows] = field(default_factory=dict)

    @functools.cached_property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        assert self.tokenizer is not None
        return self.tokenizer.token_bytes()

    def name(self, piece: Piece, tail: int | None = None) -> str:
        """Names a piece's files."""
        return piece.name(asdict(self.options), self.tokenizer and (self.tokenizer.kind, self.tokenizer.sha256), tail)

    def tokens(self, name: str) -> Path:
        return self.work / f"{name}.tokens"

    def table(self, name: str) -> Path:
        """Where this is, the piece is finished."""
        return self.work / f"{name}.npz"


@dataclass
class Notes:
    """What was left out. `not_text` and `bad` are NAMED examples at most: where, and why."""

    empty: int = 0
    not_text_count: int = 0
    bad_count: int = 0
    not_text: list[tuple[str, str]] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)


def read_table(setup: Setup, name: str) -> tuple[Table, Notes]:
    """What `encode_piece` wrote beside the tokens."""
    with np.load(setup.table(name)) as content:
        return content["rows"], Notes(**json.loads(content["notes"].tobytes()))


def encode_piece(piece: Piece, tail: int | None, setup: Setup, tick: Tick) -> None:
    """Write the files of a piece. A document that reaches beyond byte `tail` is encoded as two, cut there.

    Raises InputError naming the file (and line or row) that is broken, OSError where the disk is.
    """
    name = setup.name(piece, tail)
    temporary = setup.work / f"{name}.tmp"
    with temporary.open("wb") as file:
        encoder = _Encoder(setup, tail, file, tick)
        for span in piece.spans:
            for document in read_span(span, setup.options, setup.rows):
                encoder.encode(document, span)
            encoder.finish(span)
        sync(file)
    if setup.tokenizer:
        temporary.replace(setup.tokens(name))
    notes = np.frombuffer(json.dumps(asdict(encoder.notes)).encode(), dtype=np.uint8)
    with temporary.open("wb") as file:
        np.savez(file, rows=np.array(encoder.rows, dtype=ROW), notes=notes)
        sync(file)
    temporary.replace(setup.table(name))


def sync(file: BinaryIO) -> None:
    """Onto the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


class _Encoder:
    """Appends the tokens of documents to a file, and their rows to a list."""

    def __init__(self, setup: Setup, tail: int | None, file: BinaryIO, tick: Tick):
        self.rows: list[tuple[bytes, int, int, int, int]] = []
        self.notes = Notes()
        self._tokenizer, self._tail, self._file, self._tick = setup.tokenizer, tail, file, tick
        self._skip_bad = setup.options.skip_bad
        self._dtype = token_dtype(self._tokenizer.vocabulary) if self._tokenizer else np.dtype(np.uint8)
        self._base = self._shown = self._rows_shown = 0
        self._last = time.monotonic()

    def encode(self, document: Document, span: Span) -> None:
        """Add a document; one that turns out to be no text is noted, and leaves nothing else behind."""
        start, kept = self._file.tell(), len(self.rows)
        try:
            self._add(document, span)
        except (NotText, UnicodeDecodeError) as error:
            self._undo(start, kept)
            self._note_no_text(document, str(error) if isinstance(error, NotText) else "not valid UTF-8")
        except BadRecord as error:
            if not self._skip_bad:
                raise InputError(f"{locate(document, span)}: {error}") from None
            self._undo(start, kept)
            self.notes.bad_count += 1
            if len(self.notes.bad) < NAMED:
                self.notes.bad.append((locate(document, span), str(error)))

    def finish(self, span: Span) -> None:
        """All documents of the span were added."""
        self._base += span.size
        self._show(self._base)

    def _add(self, document: Document, span: Span) -> None:
        begin, size, tokens, sha256 = document.begin, 0, 0, hashlib.sha256()
        rows = len(self.rows)
        for chunk in document.chunks:
            cut = 0 if self._tail is None else self._tail - begin - size
            if 0 < cut <= len(chunk):
                sha256.update(chunk[:cut])
                tokens += self._write(chunk[:cut]) + self._write_end()
                self.rows.append((sha256.digest(), begin, size + cut, tokens, ENDS))
                begin, size, tokens, sha256, chunk = begin + size + cut, 0, 0, hashlib.sha256(), chunk[cut:]
            sha256.update(chunk)
            tokens += self._write(chunk)
            size += len(chunk)
            if time.monotonic() - self._last > _TICK_SECONDS:
                self._show(self._base + int(span.size * document.progress()))
        if size:
            tokens += self._write_end() if document.ends else 0
            self.rows.append((sha256.digest(), begin, size, tokens, ENDS if document.ends else 0))
        elif len(self.rows) == rows:
            self.notes.empty += 1

    def _write(self, chunk: bytes) -> int:
        """The number of tokens. Raises UnicodeDecodeError, also where documents are only hashed."""
        text = chunk.decode()
        if not self._tokenizer or not text:
            return 0
        ids = self._tokenizer.encode(text)
        self._file.write(ids.astype(self._dtype).tobytes())
        return len(ids)

    def _write_end(self) -> int:
        if not self._tokenizer:
            return 0
        self._file.write(np.array([self._tokenizer.end_of_document], self._dtype).tobytes())
        return 1

    def _undo(self, start: int, kept: int) -> None:
        self._file.seek(start)
        self._file.truncate()
        del self.rows[kept:]

    def _note_no_text(self, document: Document, why: str) -> None:
        if len(self.notes.not_text) < NAMED:
            self.notes.not_text.append((document.name, why))
        if document.begin or not document.ends:  # its other parts, in other pieces, have to go as well
            self.rows.append((bytes(32), document.begin, 0, 0, BAD | (ENDS if document.ends else 0)))
        else:
            self.notes.not_text_count += 1

    def _show(self, done: int) -> None:
        documents = sum(row[4] & ENDS for row in self.rows[self._rows_shown :])
        self._tick(done - self._shown, documents)
        self._shown, self._rows_shown, self._last = done, len(self.rows), time.monotonic()
