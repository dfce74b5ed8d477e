"""Where documents come from: one text file, or every text file below a directory."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardwise.spec import InputError

PIECE_BYTES = 1 << 20
_PROBE_BYTES = 8192


class NotText(ValueError):
    """The file is binary or not valid UTF-8; the message says which."""


@dataclass(frozen=True)
class Document:
    """One document, read in pieces so that its size does not matter."""

    name: str
    path: Path

    def pieces(self) -> Iterator[bytes]:
        """The document's bytes, each piece valid UTF-8. One piece where it is shorter than PIECE_BYTES; a longer
        document is cut after line ends (between characters where a line is longer than a piece).

        Raises NotText, possibly after some pieces, and InputError where the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                yield from _cut(file)
        except UnicodeDecodeError:
            raise NotText("not valid UTF-8") from None
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from None


def _cut(file: BinaryIO) -> Iterator[bytes]:
    rest = b""
    block = file.read(PIECE_BYTES)
    if b"\0" in block[:_PROBE_BYTES]:
        raise NotText("binary: it has NUL bytes")
    while len(block) == PIECE_BYTES:
        data = rest + block
        end = data.rfind(b"\n") + 1
        end = codecs.utf_8_decode(data[:end] if end else data, "strict", bool(end))[1]
        yield data[:end]
        rest = data[end:]
        block = file.read(PIECE_BYTES)
    data = rest + block
    codecs.utf_8_decode(data, "strict", True)
    if data:
        yield data


@dataclass(frozen=True)
class TextFiles:
    """The regular files at or below `root` whose name ends with `suffix`, in the order of their relative paths' parts.

    Directories that are hidden or named in `skip` are left out. Links are followed, but each directory is read once,
    however many links lead to it, so a loop ends.
    """

    root: Path
    suffix: str = ""
    skip: frozenset[str] = frozenset({"__pycache__"})

    def __str__(self) -> str:
        return str(self.root)

    def __iter__(self) -> Iterator[Document]:
        """Raises InputError where there is nothing at `root`, or a directory cannot be read."""
        try:
            if self.root.is_file():
                yield _document(self.root.name, self.root)
            elif self.root.is_dir():
                yield from self._below(self.root, "", set())
            elif self.root.exists():
                raise InputError(f"{self.root}: is neither a text file nor a directory")
            else:
                raise InputError(f"{self.root}: no such file or directory")
        except OSError as error:
            raise InputError(f"{error.filename or self.root}: cannot be read: {error.strerror}") from None

    def _below(self, directory: Path, prefix: str, seen: set[tuple[int, int]]) -> Iterator[Document]:
        status = directory.stat()
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        for name in sorted(entry.name for entry in directory.iterdir()):
            path = directory / name
            if path.is_dir():
                if not name.startswith(".") and name not in self.skip:
                    yield from self._below(path, f"{prefix}{name}/", seen)
            elif name.endswith(self.suffix) and path.is_file():
                yield _document(prefix + name, path)


def _document(name: str, path: Path) -> Document:
    return Document(name.encode(errors="replace").decode(), path)  # a name that is not UTF-8 can still be printed
