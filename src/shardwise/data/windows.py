"""Windows of a stream as inputs and labels, for training and for validation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.data.order import count_windows
from shardwise.data.stream import TokenStream
from shardwise.spec import InputError

NO_TARGET = -100  # the label that torch's cross-entropy leaves out


def read_windows(
    stream: TokenStream, windows: npt.NDArray[np.int64], sequence: int, vocabulary: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Inputs and labels, each [B, sequence], of windows [B]: the label of a token is the next one.

    The padding of the stream's last window has input 0 and label NO_TARGET. Raises InputError naming the shard where an
    id is not below `vocabulary`, IndexError where the stream has no such window.
    """
    inputs = np.zeros((len(windows), sequence), dtype=np.int64)
    labels = np.full((len(windows), sequence), NO_TARGET, dtype=np.int64)
    for row, window in enumerate(windows.tolist()):
        start = window * sequence
        if not 0 <= window < count_windows(stream.tokens, sequence):
            raise IndexError(f"window {window} of {count_windows(stream.tokens, sequence)}")
        ids = stream.read(start, min(start + sequence + 1, stream.tokens))
        if ids.max() >= vocabulary:
            place = int(np.argmax(ids >= vocabulary))
            path, offset = stream.locate(start + place)
            raise InputError(
                f"{path}: token {offset} has id {ids[place]}, outside the vocabulary of {vocabulary}; "
                "the file is corrupt, or model.vocabulary is too small"
            )
        inputs[row, : len(ids) - 1] = ids[:-1]
        labels[row, : len(ids) - 1] = ids[1:]
    return inputs, labels


def validation_windows(tokens: int, sequence: int, limit: int) -> npt.NDArray[np.int64]:
    """The first windows of a validation stream, in order: `limit` tokens rounded down to whole windows (at least one),
    or the whole stream where it is smaller. None where the stream has no target, or limit is 0."""
    wanted = max(1, limit // sequence) if limit > 0 else 0
    return np.arange(min(wanted, count_windows(tokens, sequence)), dtype=np.int64)
