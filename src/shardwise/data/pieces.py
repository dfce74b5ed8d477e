"""Pieces: the units of work into which sources are divided, the same however many workers share them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from shardwise.data.documents import PROBE_BYTES, BadRecord, Document, Options, begin_of, cut_text, failing, is_binary
from shardwise.data.files import File, check_format, opened, read_head
from shardwise.data.hub import Rows, check_column, read_rows, row_spans
from shardwise.data.jsonl import line_number, read_lines
from shardwise.data.parquet import group_spans, read_groups
from shardwise.data.sources import Sources
from shardwise.spec import InputError


@dataclass(frozen=True)
class Span:
    """A file or a part of it: begin … end − 1 are chunks of a text, bytes of JSON lines, row groups, or rows."""

    file: File
    size: int  # bytes to read
    begin: int = 0
    end: int | None = None  # None: to the end
    problem: str = ""  # why nothing of it can be read


@dataclass(frozen=True)
class Piece:
    """Consecutive spans that come to about Options.piece_bytes."""

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)

    def name(self, *given: object) -> str:
        """A name for what comes out of this piece with all else that decides it."""
        text = json.dumps([[astuple(span) for span in self.spans], *given], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def plan_pieces(sources: Sources, options: Options) -> Iterator[Piece]:
    """Every piece, in order, from the names, sizes and headers of files. Raises InputError."""
    spans: list[Span] = []
    size = 0
    for file in sources:
        for span in _spans(file, sources, options):
            spans.append(span)
            size += span.size
            if size >= options.piece_bytes:
                yield Piece(tuple(spans))
                spans, size = [], 0
    if spans:
        yield Piece(tuple(spans))


def read_span(span: Span, options: Options, rows: dict[str, Rows]) -> Iterator[Document]:
    """The documents of a span. Raises InputError where it cannot be read or has changed."""
    file, begin, end = span.file, span.begin, span.end
    if span.problem:
        yield Document(file.path, failing(BadRecord(span.problem)))
    elif file.kind == "text":
        yield _text(span, options.chunk_bytes)
    elif file.kind == "jsonl":
        yield from read_lines(file, begin, end, options)
    elif end is not None and file.kind == "parquet":
        yield from read_groups(file, begin, end, options)
    elif end is not None:
        yield from read_rows(rows[file.path], begin, end, options)


def locate(document: Document, span: Span) -> str:
    """Where a document stands, for a message."""
    if not document.number:
        return span.file.path
    if span.file.kind == "jsonl":
        return f"{span.file.path}:{line_number(span.file.path, span.begin, document.number)}"
    return f"{span.file.path}, row {document.number}"


def _spans(file: File, sources: Sources, options: Options) -> Iterator[Span]:
    if file.kind == "dataset":
        rows = sources.rows[file.path]
        check_column(rows, options.text_field)
        for begin, end in row_spans(rows, options):
            yield Span(file, file.size * (end - begin) // len(rows), begin, end)
        return
    try:
        check_format(file)
        if file.kind == "parquet":
            for begin, end, size in group_spans(file, options):
                yield Span(file, size, begin, end)
        else:
            yield from _ranges(file, options)
    except BadRecord as error:
        if not options.skip_bad:
            raise InputError(f"{file.path}: {error}") from None
        yield Span(file, 0, problem=str(error))


def _ranges(file: File, options: Options) -> Iterator[Span]:
    """Text and JSON lines: parts of a large file, if one may begin in its middle."""
    unit = options.chunk_bytes if file.kind == "text" else 1
    step = max(1, options.piece_bytes // unit)
    if (
        file.compression
        or file.size <= step * unit
        or (file.kind == "text" and is_binary(read_head(file, PROBE_BYTES)))
    ):
        yield Span(file, file.size)
        return
    count = -(-file.size // unit)
    for begin in range(0, count, step):
        end = begin + step
        size = min(file.size, end * unit) - begin * unit
        yield Span(file, size, begin, end if end < count else None)


def _text(span: Span, chunk: int) -> Document:
    read, size = 0, max(1, span.size)

    def chunks() -> Iterator[bytes]:
        nonlocal read
        with opened(span.file) as (stream, tell):
            for data in cut_text(stream, chunk, span.begin, span.end):
                read = tell() - span.begin * chunk
                yield data

    begin = 0
    if span.begin:
        with opened(span.file) as (stream, _):
            begin = begin_of(stream, chunk, span.begin)
    ends = span.end is None
    return Document(span.file.name, chunks(), begin=begin, ends=ends, progress=lambda: min(1.0, read / size))
