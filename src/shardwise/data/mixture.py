"""Mixtures: several sources read in fixed proportions, in an order that is still a pure function of (seed, step)."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from shardwise.data.order import Ids, Order, count_windows, samples_of
from shardwise.data.stream import TokenStream

_MOST = 1 << 30  # the largest denominator of a share, so that products fit in 64 bits


_Tree = int | tuple[Fraction, Any, Any]  # a source, or the share of the left half and both halves


class Turns:
    """Which source has turn k, and how many turns it had before; each found by itself.

    A binary tree in which the two lightest parts are joined again and again. Of the first n turns of a part, its left
    half has floor(n · share + 1/2), share being its exact fraction of the part's weight, and its right half the others:
    the hierarchical form of stride scheduling (Waldspurger and Weihl, MIT/LCS/TM-528, 1995), in closed form for two
    clients at each node. After any number of turns a source is at most two away from its share.
    """

    def __init__(self, weights: Sequence[Fraction]):
        heap: list[tuple[Fraction, int, _Tree]] = [(weight, number, number) for number, weight in enumerate(weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, first, left), (heavy, _, right) = heapq.heappop(heap), heapq.heappop(heap)
            share = (light / (light + heavy)).limit_denominator(_MOST)
            heapq.heappush(heap, (light + heavy, first, (share, left, right)))
        self._tree = heap[0][2]

    def of(self, turns: Ids) -> tuple[Ids, Ids]:
        """[turns]: the source of each turn, and the turns that the source had before."""
        source, before = np.empty_like(turns), np.empty_like(turns)
        waiting = [(self._tree, np.arange(len(turns)), turns)]
        while waiting:
            tree, places, n = waiting.pop()
            if isinstance(tree, int):
                source[places], before[places] = tree, n
                continue
            share, left, right = tree
            given = _left_turns(n, share)
            goes_left = _left_turns(n + 1, share) > given
            waiting.append((left, places[goes_left], given[goes_left]))
            waiting.append((right, places[~goes_left], (n - given)[~goes_left]))
        return source, before


def _left_turns(n: Ids, share: Fraction) -> Ids:
    """floor(n · share + 1/2), exactly, and without leaving 64 bits."""
    p, q = share.numerator, share.denominator
    whole, rest = np.divmod(n, q)
    return whole * p + (2 * rest * p + q) // (2 * q)


@dataclass(frozen=True)
class MixedOrder:
    """Order of a mixture: each place of a batch belongs to the source whose turn it is, and takes the next window of
    that source's own Order, so that each source has every window once in each of its own epochs.

    Windows are numbered through all sources, as in MixedStream. The first source has the recipe's own seed.
    """

    tokens: tuple[int, ...]  # [sources]
    weights: tuple[Fraction, ...]
    sequence: int
    batch_sequences: int
    seed: int

    def __post_init__(self) -> None:
        _ = self.orders  # raises InputError where a source has no target

    @functools.cached_property
    def orders(self) -> list[Order]:
        """[sources]"""
        seeds = (self.seed + (source << 32) for source in range(len(self.tokens)))
        return [
            Order(tokens, self.sequence, self.batch_sequences, seed)
            for tokens, seed in zip(self.tokens, seeds, strict=True)
        ]

    @functools.cached_property
    def _turns(self) -> Turns:
        return Turns(self.weights)

    def windows(self, step: int) -> Ids:
        """[batch_sequences] window numbers of a step, which counts from 0."""
        source, before = self._turns.of(samples_of(step, self.batch_sequences))
        windows = np.empty_like(source)
        first = 0
        for number, order in enumerate(self.orders):
            mine = source == number
            windows[mine] = first + order.at(before[mine])
            first += order.epoch_windows
        return windows

    def targets(self, step: int) -> int:
        """Real targets (not padding) in the whole batch of a step."""
        windows = self.windows(step)
        targets, first = self.batch_sequences * self.sequence, 0
        for order in self.orders:
            first += order.epoch_windows
            targets -= int((windows == first - 1).sum()) * order.padding
        return targets


@dataclass(frozen=True)
class MixedStream:
    """One split of every source. Windows are numbered through all of them, one source after the other."""

    names: tuple[str, ...]  # [sources]
    streams: tuple[TokenStream, ...]
    weights: tuple[Fraction, ...]  # their sum is 1

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    def first_windows(self, sequence: int) -> Ids:
        """[sources + 1]: the number of each source's first window, and of all windows."""
        return np.cumsum([0, *(count_windows(stream.tokens, sequence) for stream in self.streams)], dtype=np.int64)

    def source_of(self, window: int, sequence: int) -> tuple[TokenStream, int]:
        """The stream that a window is in, and its number there. Raises IndexError where there is no such window."""
        first = self.first_windows(sequence)
        if not 0 <= window < first[-1]:
            raise IndexError(f"window {window} of {first[-1]}")
        source = int(np.searchsorted(first, window, side="right")) - 1
        return self.streams[source], window - int(first[source])
