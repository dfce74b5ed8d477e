"""Order: which windows of the training stream make up each step, as a pure function of (seed, step).

No state and no permutation array: any step is found in the same time at any size of data, and every world size slices
the same array.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.spec import InputError

_ROUNDS = 8  # even, so that halves of unequal width end where they began
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Order:
    """Windows of `sequence` inputs tile a stream of `tokens`: window w has inputs w·S … w·S + S − 1, each with the next
    token as its target. The last window may be partial; every target belongs to exactly one window.

    Raises InputError where the stream has no target at all.
    """

    tokens: int
    sequence: int
    batch_sequences: int
    seed: int  # modulo 2^64

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise InputError(f"the training data has {self.tokens} token(s); at least 2 are needed")
        if self.sequence < 1 or self.batch_sequences < 1:
            raise ValueError(f"sequence {self.sequence} and batch_sequences {self.batch_sequences} must be at least 1")

    @property
    def epoch_windows(self) -> int:
        """Windows in one pass over the stream: ceil((tokens − 1) / sequence)."""
        return count_windows(self.tokens, self.sequence)

    @property
    def padding(self) -> int:
        """Inputs of the last window that have no target."""
        return self.epoch_windows * self.sequence - (self.tokens - 1)

    def at(self, samples: Ids) -> Ids:
        """The window number of each sample: of sample k, element k mod n of the permutation of epoch k // n, where n is
        the windows of an epoch."""
        epoch, place = np.divmod(samples, self.epoch_windows)
        seed = np.full(len(samples), self.seed % 2**64, dtype=np.uint64)
        return permute(place, self.epoch_windows, _mix(_mix(seed) + _GOLDEN * epoch.astype(np.uint64)))

    def windows(self, step: int) -> Ids:
        """[batch_sequences] window numbers of a step, which counts from 0: samples step · batch_sequences and the
        following, so a batch may span epochs."""
        return self.at(samples_of(step, self.batch_sequences))

    def targets(self, step: int) -> int:
        """Real targets (not padding) in the whole batch of a step."""
        last = int((self.windows(step) == self.epoch_windows - 1).sum())
        return self.batch_sequences * self.sequence - last * self.padding


def samples_of(step: int, batch_sequences: int) -> Ids:
    """[batch_sequences] numbers of a step's samples among all samples of the run."""
    if step < 0:
        raise ValueError(f"step {step} is negative")
    return step * batch_sequences + np.arange(batch_sequences, dtype=np.int64)


def count_windows(tokens: int, sequence: int) -> int:
    """Windows of `sequence` inputs that hold every target of a stream once: ceil((tokens − 1) / sequence)."""
    return -(-max(0, tokens - 1) // sequence)


def permute(places: Ids, n: int, keys: Words) -> Ids:
    """Where a pseudo-random permutation of 0 … n − 1 sends each place, under that place's own key; O(1) per element.

    A Feistel network over the smallest 2^b ≥ n (Luby and Rackoff, SIAM J. Computing 17, 1988), with halves of b // 2
    and b − b // 2 bits; results of n or more go through it again until they fall inside, fewer than two passes on
    average (cycle walking: Black and Rogaway, CT-RSA 2002, method 2).
    """
    bits = (n - 1).bit_length()
    round_keys = _mix(keys + np.arange(_ROUNDS, dtype=np.uint64)[:, None])  # [rounds, places]
    out = places.astype(np.uint64)
    outside = np.arange(len(out))
    while outside.size:
        out[outside] = _feistel(out[outside], bits, round_keys[:, outside])
        outside = outside[out[outside] >= n]
    return out.astype(np.int64)


def _feistel(values: Words, bits: int, round_keys: Words) -> Words:
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & np.uint64((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mix(words: Words) -> Words:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014); arithmetic modulo 2^64."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
