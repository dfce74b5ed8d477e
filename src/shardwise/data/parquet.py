"""Parquet: one document a row, from one column of text."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from shardwise.data.documents import BadRecord, Document, Options, failing, record_chunks
from shardwise.data.files import File, require_same
from shardwise.spec import InputError
from shardwise.spec.noun import nearest

_BATCH = 256  # rows that are decoded at once


def group_spans(file: File, options: Options) -> Iterator[tuple[int, int, int]]:
    """Ranges of row groups of about a piece each, and the bytes of their text. Raises BadRecord, InputError."""
    with _opened(file) as parquet:
        _check_column(file, parquet.schema_arrow, options.text_field)
        prefix = f"{options.text_field}."
        begin = size = 0
        for group in range(parquet.metadata.num_row_groups):
            metadata = parquet.metadata.row_group(group)
            chunks = map(metadata.column, range(metadata.num_columns))
            size += sum(c.total_uncompressed_size for c in chunks if f"{c.path_in_schema}.".startswith(prefix))
            if size >= options.piece_bytes or group == parquet.metadata.num_row_groups - 1:
                yield begin, group + 1, size
                begin, size = group + 1, 0


def read_groups(file: File, begin: int, end: int, options: Options) -> Iterator[Document]:
    """One document for each row of row groups begin … end − 1, numbered within the file; a null is an empty one."""
    number = 0
    try:
        with _opened(file) as parquet:
            rows = [parquet.metadata.row_group(group).num_rows for group in range(end)]
            first = number = sum(rows[:begin])
            count, field = max(1, sum(rows[begin:])), options.text_field
            groups = list(range(begin, end))
            for batch in parquet.iter_batches(_BATCH, row_groups=groups, columns=[field], use_threads=False):
                for text in _texts(batch.column(0), field):
                    number += 1
                    share = (number - first) / count
                    yield Document(
                        file.path, record_chunks(text, options), number, progress=functools.partial(float, share)
                    )
    except BadRecord as error:
        yield Document(file.path, failing(error), number + 1)


@contextlib.contextmanager
def _opened(file: File) -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        require_same(file)
        with ParquetFile(file.path) as parquet:
            yield parquet
        require_same(file)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # Arrow's own carry none
            raise InputError(f"{file.path}: cannot be read: {error.strerror}") from None
        raise BadRecord(f"its Parquet data is truncated or damaged: {str(error).splitlines()[0]}") from None


def _check_column(file: File, schema: Any, field: str) -> None:
    """Raises InputError where there is no such column, or it does not hold text."""
    from pyarrow import types

    found: Any = schema
    for key in [field] if field in schema.names else field.split("."):
        if found is not schema and not types.is_struct(found):
            found = None
        elif key in (schema.names if found is schema else [part.name for part in found]):
            found = found.field(key).type
        else:
            found = None
        if found is None:
            near = nearest(field, schema.names)
            hint = f"did you mean '{near}'? " if near else ""
            raise InputError(f"{file.path}: has no column '{field}'; {hint}It has: {', '.join(schema.names)}")
    value = found.value_type if types.is_dictionary(found) else found
    textual = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if not any(check(value) for check in textual):
        raise InputError(f"{file.path}: column '{field}' holds {found}; text is expected")


def _texts(column: Any, field: str) -> list[bytes | None]:
    """The values as bytes, so that invalid UTF-8 is found row by row."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_struct(column.type):
        column = compute.struct_field(column, field.split(".")[1:])
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values: list[bytes | None] = column.cast(pyarrow.large_binary()).to_pylist()
    return values
