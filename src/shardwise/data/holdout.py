"""Which documents are held out for validation: a function of their content alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def hold_out(keys: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """[documents]: whether each is held out, from the first 64 bits of its content's hash (`keys`) and its bytes.

    A document is held out where its hash, as a share of all hashes, is below `fraction`; so copies of one document
    fall on the same side, whatever else is there. Only where that leaves one side empty, that side gets the document
    (and its copies) whose size comes closest to the side's share of the text. With a single distinct document, or
    fraction 0, none is held out.
    """
    if fraction == 0 or len(np.unique(keys)) < 2:
        return np.zeros(len(keys), dtype=np.bool_)
    held = keys < np.uint64(int(fraction * 2**64))
    if held.any() and not held.all():
        return held
    share = 1 - fraction if held.all() else fraction
    distance = np.abs(sizes.astype(np.float64) - share * float(sizes.sum()))
    alone = keys == keys[np.lexsort((keys, distance))[0]]
    return ~alone if held.all() else alone


def find_tail(chunks: Iterable[bytes], size: int, fraction: float) -> int | None:
    """Where the held-out tail of a lone document of `size` bytes begins: the last line start that leaves at least
    `fraction` of the text behind it, else the first line start. None where the text is a single line."""
    wanted = size - math.ceil(fraction * size)
    done, tail = 0, None
    for chunk in chunks:
        if tail is None or done < wanted:
            start = chunk.rfind(b"\n", 0, max(0, wanted - done)) + 1
            if not start and tail is None:
                start = chunk.find(b"\n") + 1
            if start and done + start < size:
                tail = done + start
        done += len(chunk)
    return tail
