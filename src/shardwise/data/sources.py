"""Sources: what `data prepare` is given, as files in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.data.files import File, expand, find_file
from shardwise.data.hub import HUB, Rows, is_saved, load_rows
from shardwise.spec import InputError


@dataclass(frozen=True)
class Sources:
    """The files at or below each place, whose names end with `suffix`, in the order of their relative paths' parts.

    A place is a path, a pattern, or `hf:NAME[:CONFIG][@SPLIT]`. Directories that are hidden or named in `skip` are left
    out. Links are followed, but each directory of a place is read once, however many links lead to it, so a loop ends.
    """

    places: tuple[str, ...]
    suffix: str = ""
    skip: frozenset[str] = frozenset({"__pycache__"})
    rows: dict[str, Rows] = field(default_factory=dict)  # the data sets among them, once they are loaded

    def __str__(self) -> str:
        return ", ".join(self.places)

    def paths(self) -> Iterator[Path]:
        """The paths among the places. Raises InputError where a pattern matches nothing."""
        return (path for place in self.places if not place.startswith(HUB) for path in expand(place))

    def __iter__(self) -> Iterator[File]:
        """Raises InputError where there is nothing at a place, or a directory cannot be read."""
        for place in self.places:
            if place.startswith(HUB):
                yield self._dataset(place)
                continue
            for path in expand(place):
                try:
                    yield from self._at(path)
                except OSError as error:
                    raise InputError(f"{error.filename or path}: cannot be read: {error.strerror}") from None

    def _at(self, path: Path) -> Iterator[File]:
        if path.is_file():
            yield find_file(path, path.name)
        elif path.is_dir():
            yield from self._below(path, "", set())
        elif path.exists():
            raise InputError(f"{path}: is neither a file nor a directory")
        else:
            raise InputError(f"{path}: no such file or directory")

    def _below(self, directory: Path, prefix: str, seen: set[tuple[int, int]]) -> Iterator[File]:
        status = directory.stat()
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        if is_saved(directory):
            yield self._dataset(str(directory))
            return
        for name in sorted(entry.name for entry in directory.iterdir()):
            path = directory / name
            if path.is_dir():
                if not name.startswith(".") and name not in self.skip:
                    yield from self._below(path, f"{prefix}{name}/", seen)
            elif name.endswith(self.suffix) and path.is_file():
                yield find_file(path, prefix + name)

    def _dataset(self, place: str) -> File:
        if place not in self.rows:
            self.rows[place] = load_rows(place)
        return File(place, place, "dataset", "", self.rows[place].bytes, self.rows[place].content)
