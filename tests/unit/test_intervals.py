"""Interval arithmetic against counting cells: every interval here has whole numbers as its ends."""

import numpy as np
import pytest

from shardwise.timeline.intervals import EMPTY, clip, intersect, length, subtract, union

SIZE = 60


def random_cover(generator, count):
    start = generator.integers(0, SIZE, count)
    end = np.minimum(SIZE, start + generator.integers(0, 8, count))  # some are empty
    cells = np.zeros(SIZE, dtype=bool)
    for first, last in zip(start, end, strict=True):
        cells[first:last] = True
    return union(start.astype(float), end.astype(float)), cells


def cells_of(cover):
    cells = np.zeros(SIZE, dtype=bool)
    for start, end in zip(*cover, strict=True):
        assert end > start
        assert not cells[int(start) : int(end)].any()
        cells[int(start) : int(end)] = True
    assert (np.diff(cover[0]) > 0).all()
    return cells


@pytest.mark.parametrize("seed", range(50))
def test_equal_to_counting_cells(seed):
    generator = np.random.default_rng(seed)
    a, cells_a = random_cover(generator, int(generator.integers(0, 20)))
    b, cells_b = random_cover(generator, int(generator.integers(0, 20)))
    low, high = sorted(generator.integers(0, SIZE, 2).tolist())
    inside = np.zeros(SIZE, dtype=bool)
    inside[low:high] = True
    for found, expected in [
        (a, cells_a),
        (intersect(a, b), cells_a & cells_b),
        (subtract(a, b), cells_a & ~cells_b),
        (clip(a, low, high), cells_a & inside),
    ]:
        assert length(found) == expected.sum()
        assert (cells_of(union(*found)) == expected).all()


def test_nothing():
    one = (np.array([1.0]), np.array([3.0]))
    assert length(intersect(EMPTY, one)) == length(subtract(EMPTY, one)) == length(clip(EMPTY, 0, 1)) == 0
    assert length(subtract(one, EMPTY)) == 2
    assert length(subtract(one, one)) == 0
