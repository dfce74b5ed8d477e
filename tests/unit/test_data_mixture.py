"""Mixtures: exact proportions at every moment, each source's windows once an epoch, at any world size."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from test_data_tokenizer import byte_level

from shardwise.data import NO_TARGET, Data, MixedStream, Order, open_data, prepare, read_windows, validation_parts
from shardwise.data.mixture import MixedOrder, Turns
from shardwise.data.shards import Weighted
from shardwise.spec import InputError


def shares(*weights: float | str) -> tuple[Fraction, ...]:
    exact = [Fraction(str(weight)) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


WEIGHTS = [
    shares(1),
    shares(1, 1),
    shares(0.7, 0.3),
    shares(0.999, 0.001),
    shares(1, 2, 3, 4, 5, 6, 7),
    shares(1, 1, 1, 1, 1),
    shares(0.5, 0.25, 0.125, 0.0625, 0.0625),
    shares("0.333333", "0.1234567", "3e-4", 12, 5.5),
    shares(*(1 / (number + 1) for number in range(40))),
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
def test_proportions_hold_at_every_moment(weights: tuple[Fraction, ...]) -> None:
    source, before = Turns(weights).of(np.arange(5000))
    for number, weight in enumerate(weights):
        mine = source == number
        assert before[mine].tolist() == list(range(mine.sum()))  # each turn counted once, in order
        deviation = np.cumsum(mine) - float(weight) * np.arange(1, 5001)
        assert np.abs(deviation).max() < 2


def test_any_turn_is_found_by_itself() -> None:
    turns, all_at_once = Turns(shares(3, 1, 0.77)), np.arange(1000)
    source, before = turns.of(all_at_once)
    for place in (0, 17, 999):
        one = turns.of(np.array([place]))
        assert (one[0][0], one[1][0]) == (source[place], before[place])


def test_turns_far_away_are_exact() -> None:
    """A float would be off by a hundred turns here."""
    weights = shares("0.7123456", "0.2876543", "0.0000001")
    far = 10**17 + np.arange(200_000)
    source, before = Turns(weights).of(far)
    for number, weight in enumerate(weights):
        mine = source == number
        assert (np.diff(before[mine]) == 1).all()
        if mine.any():
            assert abs(int(before[mine][0]) - int(far[mine][0]) * weight) < 2


def test_the_order_never_changes_silently() -> None:
    """Resuming an old run on a new version must read the same windows."""
    order = MixedOrder((1001, 501, 77), shares(5, 3, 2), sequence=10, batch_sequences=10, seed=0)
    assert order.windows(0).tolist() == [77, 115, 23, 156, 95, 141, 29, 154, 19, 114]
    assert order.windows(10**6).tolist() == [67, 131, 56, 150, 68, 126, 24, 151, 94, 124]


@pytest.mark.parametrize("batch", [1, 7, 12])
def test_each_source_is_read_once_in_each_of_its_epochs(batch: int) -> None:
    tokens, sequence = (400, 33, 70), 8
    order = MixedOrder(tokens, shares(5, 3, 2), sequence, batch, seed=3)
    windows = np.concatenate([order.windows(step) for step in range(2400 // batch)])
    counts = [-(-(number - 1) // sequence) for number in tokens]
    first = np.cumsum([0, *counts])
    for source, count in enumerate(counts):
        own = windows[(windows >= first[source]) & (windows < first[source + 1])] - first[source]
        epochs = own[: len(own) // count * count].reshape(-1, count)
        assert len(epochs) > 4
        for epoch in epochs:
            assert sorted(epoch.tolist()) == list(range(count))


def test_the_first_source_keeps_its_own_order() -> None:
    lone = Order(1001, 10, 8, seed=5)
    assert MixedOrder((1001,), shares(3), 10, 8, seed=5).windows(7).tolist() == lone.windows(7).tolist()
    mixed = MixedOrder((1001, 1001), shares(1, 1), 10, 16, seed=5)
    own = [window for window in mixed.windows(0).tolist() if window < 100]
    assert own == lone.windows(0).tolist()
    assert [window - 100 for window in mixed.windows(0).tolist() if window >= 100] != own  # the second has another


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_world_size_reads_the_same_batch(world: int) -> None:
    order = MixedOrder((999, 500), shares(2, 1), 5, 12, seed=0)
    ranks = [order.windows(9)[rank * 12 // world :][: 12 // world] for rank in range(world)]
    assert np.concatenate(ranks).tolist() == order.windows(9).tolist()


def prepared(tmp_path: Path, name: str, letter: str, count: int, tokenizer: str = "bytes") -> Weighted:
    source = tmp_path / f"source-{name}"
    source.mkdir()
    for number in range(count):
        (source / f"{number:03d}.txt").write_text(letter * (number % 7 + 3))
    prepare(source, tmp_path / name, tokenizer, validation_fraction=0.3, shard_tokens=50, workers=1)
    return Weighted(name, tmp_path / name, {"a": 3.0, "b": 1.0}.get(name, 2.0))


@pytest.fixture
def mixture(tmp_path: Path) -> Data:
    return open_data([prepared(tmp_path, "a", "a", 40), prepared(tmp_path, "b", "b", 25)])


def test_windows_come_from_their_source(mixture: Data) -> None:
    order = mixture.order(16, 8, 0)
    letters = {"a": 0, "b": 0}
    for step in range(20):
        windows = order.windows(step)
        inputs, labels = read_windows(mixture.train, windows, 16, 257)
        assert (labels != NO_TARGET).sum() == order.targets(step)
        for row in inputs:
            (letter,) = {chr(token) for token in row if token not in (0, 256)}
            letters[letter] += 1
    assert letters == {"a": 120, "b": 40}


def test_reads_outside_and_of_wrong_ids(mixture: Data) -> None:
    assert isinstance(mixture.train, MixedStream)
    for window in (-1, int(mixture.train.first_windows(16)[-1])):
        with pytest.raises(IndexError, match=f"window {window} of"):
            read_windows(mixture.train, np.array([window]), 16, 257)
    first = int(mixture.train.first_windows(16)[1])
    with pytest.raises(InputError, match=r"b/train-00000\.npy: token \d+ has id 256, outside the vocabulary of 256"):
        read_windows(mixture.train, np.array([first]), 16, 256)


def test_validation_is_shared_by_weight(mixture: Data) -> None:
    assert isinstance(mixture.validation, MixedStream)
    first = mixture.validation.first_windows(4)
    parts = dict(validation_parts(mixture.validation, 4, 4 * 8))
    assert parts["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert parts["b"].tolist() == [first[1], first[1] + 1]
    assert [len(part) for _, part in validation_parts(mixture.validation, 4, 4)] == [1, 1]  # at least one each
    assert [len(part) for _, part in validation_parts(mixture.validation, 4, 10**6)] == np.diff(first).tolist()
    assert [len(part) for _, part in validation_parts(mixture.validation, 4, 0)] == [0, 0]
    lone = mixture.validation.streams[0]
    assert [(name, part.tolist()) for name, part in validation_parts(lone, 4, 9)] == [("", [0, 1])]


def test_a_source_without_validation_leaves_it_to_the_others(tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text("c" * 99)
    prepare(tmp_path / "line.txt", tmp_path / "c")
    data = open_data([prepared(tmp_path, "a", "a", 40), Weighted("c", tmp_path / "c", 9.0)])
    assert [(name, len(part)) for name, part in validation_parts(data.validation, 4, 16)] == [("a", 4)]


def test_the_fingerprint_covers_sources_order_and_weights(tmp_path: Path) -> None:
    a, b = prepared(tmp_path, "a", "a", 9), prepared(tmp_path, "b", "b", 9)

    def fingerprint(*sources: tuple[Weighted, float]) -> str:
        return open_data([source._replace(weight=weight) for source, weight in sources]).fingerprint

    same = {fingerprint((a, 3), (b, 1)), fingerprint((a, 0.75), (b, 0.25)), fingerprint((a, 1.5), (b, 0.5))}
    assert len(same) == 1
    others = {fingerprint((b, 1), (a, 3)), fingerprint((a, 1), (b, 1)), fingerprint((a, 1))}
    assert len(others | same) == 4
    assert fingerprint((a, 1)) == open_data(a.directory).fingerprint  # a mixture of one is no mixture


def test_sources_must_share_a_tokenizer(tmp_path: Path) -> None:
    byte_level(tmp_path / "tokenizer.json")
    a = prepared(tmp_path, "a", "a", 9)
    c = prepared(tmp_path, "c", "c", 9, str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        InputError,
        match=r"recipe\.data\.1: the tokens of .*/c come from another tokenizer than those of .*/a "
        r"\(huggingface, 300 ids, [0-9a-f]{8}; bytes, 257 ids, no table\); prepare both with the same",
    ):
        open_data([a, c])
