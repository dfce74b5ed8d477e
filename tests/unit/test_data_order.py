"""Order: a permutation of windows that is a pure function of (seed, step)."""

import numpy as np
import pytest

from shardwise.data import Order
from shardwise.data.order import count_windows, permute
from shardwise.spec import InputError


def stretch(order: Order, samples: int) -> np.ndarray:
    """The first windows of a run."""
    steps = -(-samples // order.batch_sequences)
    return np.concatenate([order.windows(step) for step in range(steps)])[:samples]


def test_the_order_never_changes_silently() -> None:
    """Resuming an old run on a new version must read the same windows."""
    assert Order(1001, 10, 8, 0).windows(0).tolist() == [77, 23, 95, 29, 19, 71, 5, 91]
    assert Order(1001, 10, 8, 0).windows(12).tolist() == [32, 60, 39, 6, 50, 7, 42, 53]  # spans epochs 0 and 1
    assert Order(1001, 10, 8, 1).windows(0).tolist() == [61, 37, 98, 17, 25, 49, 40, 41]
    assert Order(10**12, 1024, 4, 42).windows(10**6).tolist() == [534958041, 355068553, 175004941, 972961379]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 64, 100, 257])
@pytest.mark.parametrize("batch", [1, 7, 32])
def test_every_window_once_an_epoch_across_batches(n: int, batch: int) -> None:
    order = Order(n * 4 + 1, 4, batch, seed=3)
    windows = stretch(order, 3 * n).reshape(3, n)
    assert order.epoch_windows == n
    for epoch in windows:
        assert sorted(epoch.tolist()) == list(range(n))


def test_epochs_and_seeds_differ() -> None:
    first, second = stretch(Order(10_001, 10, 50, 0), 2000).reshape(2, 1000)
    other = stretch(Order(10_001, 10, 50, 1), 1000)
    for a, b in ((first, second), (first, other), (second, other), (first, np.arange(1000))):
        assert (a == b).mean() < 0.02  # about 1 place in 1000 agrees by chance
    assert Order(10_001, 10, 50, 2**64 + 1).windows(0).tolist() == other[:50].tolist()


def test_the_order_does_not_depend_on_how_it_is_batched() -> None:
    small, large = Order(5000, 7, 4, 9), Order(5000, 7, 24, 9)
    assert stretch(small, 2400).tolist() == stretch(large, 2400).tolist()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_every_world_size_reads_the_same_batch(world: int) -> None:
    order = Order(999, 5, 12, 0)
    for step in (0, 16, 10**9):
        per_rank = 12 // world
        ranks = [Order(999, 5, 12, 0).windows(step)[rank * per_rank :][:per_rank] for rank in range(world)]
        assert np.concatenate(ranks).tolist() == order.windows(step).tolist()


def test_a_trillion_tokens_need_no_permutation_array() -> None:
    order = Order(10**12, 1024, 512, 0)
    last = order.epoch_windows // 512  # the step in which epoch 0 ends
    windows = order.windows(last)
    assert windows.shape == (512,) and windows.dtype == np.int64
    assert windows.min() >= 0 and windows.max() < order.epoch_windows == count_windows(10**12, 1024)
    halves = np.concatenate([order.windows(step) for step in range(0, last, last // 100)]) < order.epoch_windows // 2
    assert 0.47 < halves.mean() < 0.53


def test_first_element_is_spread_evenly_over_keys() -> None:
    keys = np.random.default_rng(0).integers(0, 2**63, 50_000).astype(np.uint64)
    counts = np.bincount(permute(np.zeros(50_000, dtype=np.int64), 100, keys), minlength=100)
    assert ((counts - 500) ** 2 / 500).sum() < 160  # chi-squared with 99 degrees of freedom: p = 1e-4


@pytest.mark.parametrize("tokens", [2, 9, 10, 11, 12, 101])
def test_targets_count_every_target_once_an_epoch(tokens: int) -> None:
    order = Order(tokens, 10, 1, 0)  # one sample a step, so an epoch is epoch_windows steps
    n = order.epoch_windows
    assert sum(order.targets(step) for step in range(n)) == tokens - 1
    whole = Order(tokens, 10, 3 * n, 0)
    assert whole.targets(0) == 3 * (tokens - 1)


def test_impossible_orders() -> None:
    for tokens in (0, 1):
        with pytest.raises(InputError, match="at least 2 are needed"):
            Order(tokens, 8, 1, 0)
    with pytest.raises(ValueError, match="sequence 0"):
        Order(10, 0, 1, 0)
    with pytest.raises(ValueError, match="negative"):
        Order(10, 2, 1, 0).windows(-1)
