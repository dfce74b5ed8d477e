"""JSON lines: one object a line, one of its fields a document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.data.documents import BOM, BadRecord, Document, Options, failing, record_chunks
from shardwise.data.files import File, opened
from shardwise.spec.noun import nearest

_SKIPPED = 1 << 20  # bytes that are skipped at once


def read_lines(file: File, begin: int, end: int | None, options: Options) -> Iterator[Document]:
    """One document for each line that begins in bytes begin … end − 1 (None: to the end); blank lines are none."""
    number, size = 0, max(1, (end or file.size) - begin)
    try:
        with opened(file) as (stream, tell):
            position = begin
            if begin:
                stream.seek(begin - 1)
                position += _skip_line(stream) - 1
            while end is None or position < end:
                line = stream.readline(options.record_bytes + 1)
                if not line:
                    break
                number += 1
                chunks, length = _chunks(line, position == 0, options), len(line)
                if length > options.record_bytes:
                    length += 0 if line.endswith(b"\n") else _skip_line(stream)
                    chunks = failing(BadRecord(f"the line is longer than {options.record_bytes:,} bytes"))
                position += length
                if line.strip():
                    yield Document(file.path, chunks, number, progress=lambda: min(1.0, (tell() - begin) / size))
    except BadRecord as error:
        yield Document(file.path, failing(error), number + 1)


def line_number(path: str, begin: int, number: int) -> int:
    """Which line of the file, from 1, the number-th of those that begin at byte `begin` or later is."""
    left, lines = begin - 1, number + (begin > 0)
    with Path(path).open("rb") as file:
        while left > 0 and (block := file.read(min(left, _SKIPPED))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines


def _skip_line(stream: BinaryIO) -> int:
    """The bytes of the rest of a line, its end included."""
    size = 0
    while part := stream.readline(_SKIPPED):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _chunks(line: bytes, first: bool, options: Options) -> Iterator[bytes]:
    field = options.text_field
    try:
        record = json.loads((line.removeprefix(BOM) if first else line).decode())
    except UnicodeDecodeError as error:
        raise BadRecord(f"the line is not valid UTF-8 at its byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise BadRecord(f"the line is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested lists
        raise BadRecord(f"the line cannot be read as JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadRecord(f"the line is a JSON {type(record).__name__}; an object with field '{field}' is expected")
    yield from record_chunks(_find(record, field), options)


def _find(record: dict[str, Any], field: str) -> Any:
    """The value at `field`: a key, or keys with dots between them."""
    if field in record:
        return record[field]
    value: Any = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            near = nearest(field, record)
            hint = f"; did you mean '{near}'?" if near else "."
            raise BadRecord(f"the line has no field '{field}'{hint} It has: {', '.join(list(record)[:10]) or 'none'}")
        value = value[key]
    return value
