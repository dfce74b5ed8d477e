"""Documents as they come out of any source, and how their text is cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 20  # of text that is encoded at once. Changing it changes the tokens next to a cut
PIECE_BYTES = 1 << 23  # of a source in one unit of work. Changing it changes who of the larger files is held out
RECORD_BYTES = 1 << 26  # of the longest line of JSON, and of the longest text of a row
BOM = b"\xef\xbb\xbf"
PROBE_BYTES = 8192


class NotText(ValueError):
    """The file is binary or not valid UTF-8; the message says which. Such files are left out."""


class BadRecord(ValueError):
    """A line, a row or a file that was meant to hold text is broken: an error, or left out with skip_bad."""


@dataclass(frozen=True)
class Options:
    """What decides how a source becomes documents."""

    text_field: str = "text"
    skip_bad: bool = False
    chunk_bytes: int = CHUNK_BYTES
    piece_bytes: int = PIECE_BYTES
    record_bytes: int = RECORD_BYTES


@dataclass(frozen=True)
class Document:
    """One document, or one part of a text file that is too large for one piece.

    `chunks` can be iterated once: bytes of at most twice Options.chunk_bytes. It raises NotText, BadRecord or
    InputError, possibly after some of them.
    """

    name: str
    chunks: Iterator[bytes]
    number: int = 0  # of the line or row, from 1; 0: the whole file
    begin: int = 0  # the byte of the document at which this part begins
    ends: bool = True  # whether the document ends with this part
    progress: Callable[[], float] = lambda: 0.0  # the share of its span that has been read by now


def failing(error: Exception) -> Iterator[bytes]:
    """The chunks of a document that cannot be read."""
    raise error
    yield


def is_binary(head: bytes) -> bool:
    """Whether a file that starts like this is no text."""
    return b"\0" in head[:PROBE_BYTES]


def cut_text(file: BinaryIO, chunk: int, first: int, last: int | None) -> Iterator[bytes]:
    """The text in blocks first … last − 1 (None: to the end) of `chunk` bytes each, cut after line ends, or between
    characters where a block has no line end. A leading byte-order mark is left out.

    Each cut depends on one block alone, so the parts of a file can be read independently. Raises NotText.
    """
    rest = b""
    if first:
        file.seek((first - 1) * chunk)
        block = file.read(chunk)
        rest = block[_cut_of(block) :]
    block = file.read(chunk)
    whole = len(block) == chunk
    if not first:
        if is_binary(block):
            raise NotText("binary: it has NUL bytes")
        block = block.removeprefix(BOM)
    while whole:
        end = len(rest) + _cut_of(block)
        data = rest + block
        if end:
            yield data[:end]
        first, rest = first + 1, data[end:]
        if first == last:
            return
        block = file.read(chunk)
        whole = len(block) == chunk
    if rest or block:
        yield rest + block


def begin_of(file: BinaryIO, chunk: int, first: int) -> int:
    """The byte of the text at which `cut_text` begins for a `first` above 0."""
    mark = len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek((first - 1) * chunk)
    return (first - 1) * chunk + _cut_of(file.read(chunk)) - mark


def record_chunks(value: Any, options: Options) -> Iterator[bytes]:
    """The text of a record, checked, in chunks like a file's. None is an empty text. Raises BadRecord."""
    field = f"field '{options.text_field}'"
    try:
        text = value.encode() if isinstance(value, str) else b"" if value is None else value
        if not isinstance(text, bytes):
            raise BadRecord(f"{field} is of type {type(value).__name__}; a text is expected")
        if text is value:
            text.decode()
    except UnicodeEncodeError:
        raise BadRecord(f"{field} holds half of a surrogate pair, which is no character") from None
    except UnicodeDecodeError as error:
        raise BadRecord(f"{field} is not valid UTF-8 at its byte {error.start + 1}") from None
    if len(text) > options.record_bytes:
        raise BadRecord(f"{field} is longer than {options.record_bytes:,} bytes")
    begin = 0
    for block in range(0, len(text) - options.chunk_bytes, options.chunk_bytes):
        end = block + _cut_of(text[block : block + options.chunk_bytes])
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


def _cut_of(block: bytes) -> int:
    """Where a block is cut: after its last line end, else after its last whole character."""
    end = block.rfind(b"\n") + 1
    if end:
        return end
    for back in range(1, min(4, len(block))):
        byte = block[-back]
        if byte >= 0xC0:  # the first byte of a character of `size` bytes
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(block) - back if size > back else len(block)
        if byte < 0x80:
            break
    return len(block)
