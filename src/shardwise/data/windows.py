"""Windows of a stream as inputs and labels, for training and for validation."""

from __future__ import annotations

import numpy as np

from shardwise.data.mixture import MixedStream
from shardwise.data.order import count_windows
from shardwise.data.stream import Ids, TokenStream
from shardwise.spec import InputError

NO_TARGET = -100  # the label that torch's cross-entropy leaves out

Stream = TokenStream | MixedStream


def read_windows(stream: Stream, windows: Ids, sequence: int, vocabulary: int) -> tuple[Ids, Ids]:
    """Inputs and labels, each [B, sequence], of windows [B]: the label of a token is the next one.

    The padding of the stream's last window has input 0 and label NO_TARGET. Raises InputError naming the shard where an
    id is not below `vocabulary`, IndexError where the stream has no such window.
    """
    inputs = np.zeros((len(windows), sequence), dtype=np.int64)
    labels = np.full((len(windows), sequence), NO_TARGET, dtype=np.int64)
    for row, window in enumerate(windows.tolist()):
        source, own = stream.source_of(window, sequence) if isinstance(stream, MixedStream) else (stream, window)
        count = count_windows(source.tokens, sequence)
        if not 0 <= own < count:
            raise IndexError(f"window {own} of {count}")
        start = own * sequence
        ids = source.read(start, min(start + sequence + 1, source.tokens))
        if ids.max() >= vocabulary:
            place = int(np.argmax(ids >= vocabulary))
            path, offset = source.locate(start + place)
            raise InputError(
                f"{path}: token {offset} has id {ids[place]}, outside the vocabulary of {vocabulary}; "
                "the file is corrupt, or model.vocabulary is too small"
            )
        inputs[row, : len(ids) - 1] = ids[:-1]
        labels[row, : len(ids) - 1] = ids[1:]
    return inputs, labels


def validation_windows(tokens: int, sequence: int, limit: int) -> Ids:
    """The first windows of a validation stream, in order: `limit` tokens rounded down to whole windows (at least one),
    or the whole stream where it is smaller. None where the stream has no target, or limit is 0."""
    wanted = max(1, limit // sequence) if limit > 0 else 0
    return np.arange(min(wanted, count_windows(tokens, sequence)), dtype=np.int64)


def validation_parts(stream: Stream, sequence: int, limit: int) -> list[tuple[str, Ids]]:
    """`validation_windows` by the source's name, which is empty for a lone one.

    In a mixture the limit is divided by weight among the sources that have a validation split: whole windows, the
    largest remainders rounded up, at least one each. A source that has less gives what it has.
    """
    if isinstance(stream, TokenStream):
        return [("", validation_windows(stream.tokens, sequence, limit))]
    first = stream.first_windows(sequence)
    there = [source for source in range(len(stream.names)) if first[source + 1] > first[source]]
    wanted = max(1, limit // sequence) if limit > 0 else 0
    exact = [wanted * stream.weights[source] / sum(stream.weights[s] for s in there) for source in there]
    counts = [int(share) for share in exact]
    for place in sorted(range(len(there)), key=lambda place: counts[place] - exact[place])[: wanted - sum(counts)]:
        counts[place] += 1
    parts = []
    for source, count in zip(there, counts, strict=True):
        own = validation_windows(stream.streams[source].tokens, sequence, max(1, count) * sequence if limit else 0)
        parts.append((stream.names[source], first[source] + own))
    return parts
