"""Survey: what was found in all pieces together, and what was left out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.data.encode import BAD, ENDS, NAMED, ROW, Notes, Setup, Table, read_table
from shardwise.spec import InputError
from shardwise.spec.numbers import human


@dataclass(frozen=True)
class Survey:
    """Every document that was found; 17 bytes each."""

    keys: npt.NDArray[np.uint64]  # [documents]: the first 64 bits of each one's hash
    sizes: npt.NDArray[np.uint64]  # [documents]: bytes
    kept: npt.NDArray[np.bool_]  # [documents]: whether it is text
    sha256: str  # over the hashes of those that are kept

    @property
    def text_bytes(self) -> int:
        return int(self.sizes[self.kept].sum())


def take_survey(names: Iterable[str], setup: Setup, sources: object, say: Callable[[str], None]) -> Survey:
    """Read the tables of all pieces, in order. Raises InputError where there is no text."""
    keys, sizes, kept = [], [], []
    total, notes = hashlib.sha256(), Notes()
    for rows in _whole_documents(names, setup, notes):
        starts = np.flatnonzero(rows["begin"] == 0)
        counts = np.diff(starts, append=len(rows))
        digests = rows["sha256"][starts].copy()
        for document in np.flatnonzero(counts > 1):  # a hash of its parts' hashes
            parts = rows["sha256"][starts[document] :][: counts[document]]
            digests[document] = np.void(hashlib.sha256(parts.tobytes()).digest())
        is_text = (np.bitwise_or.reduceat(rows["flags"], starts) & BAD) == 0
        notes.not_text_count += int((~is_text).sum())
        total.update(digests[is_text].tobytes())
        words = np.frombuffer(digests.tobytes(), dtype=">u8").reshape(-1, 4)
        keys.append(words[:, 0].astype(np.uint64))
        sizes.append(np.add.reduceat(rows["size"], starts))
        kept.append(is_text)
    _say_left_out(notes, sources, any(part.any() for part in kept), say)
    survey = Survey(np.concatenate(keys), np.concatenate(sizes), np.concatenate(kept), total.hexdigest())
    say(f"found {int(survey.kept.sum()):,} documents, {human(survey.text_bytes)} bytes of text")
    return survey


def _whole_documents(names: Iterable[str], setup: Setup, notes: Notes) -> Iterator[Table]:
    """The tables, with the parts of a document that began in an earlier piece put together."""
    begun = np.empty(0, dtype=ROW)
    for name in names:
        rows, found = read_table(setup, name)
        _merge(notes, found)
        rows = np.concatenate([begun, rows])
        whole = len(rows)
        if whole and not rows[-1]["flags"] & ENDS:
            whole = int(np.flatnonzero(rows["begin"] == 0)[-1])
        begun = rows[whole:]
        if whole:
            yield rows[:whole]


def _merge(notes: Notes, found: Notes) -> None:
    notes.empty += found.empty
    notes.not_text_count += found.not_text_count
    notes.bad_count += found.bad_count
    named = {name for name, _ in notes.not_text}  # parts of one file may each have said so
    notes.not_text += [item for item in found.not_text if item[0] not in named][: NAMED - len(notes.not_text)]
    notes.bad += found.bad[: NAMED - len(notes.bad)]


def _say_left_out(notes: Notes, sources: object, any_text: bool, say: Callable[[str], None]) -> None:
    lines = [f"{notes.empty} empty"] if notes.empty else []
    for count, what, named in (
        (notes.not_text_count, "not text", notes.not_text),
        (notes.bad_count, "bad", notes.bad),
    ):
        if count:
            examples = ", ".join(f"{where} ({why})" for where, why in named)
            lines.append(f"{count} {what}: {examples}{', …' if count > len(named) else ''}")
    if not any_text:
        raise InputError(f"{sources}: holds no text" + (f"; left out: {'; '.join(lines)}" if lines else ""))
    if lines:
        say(f"left out: {'; '.join(lines)}")
