"""Streams and windows: every target exactly once, across shards of any size."""

from pathlib import Path

import numpy as np
import pytest

from shardwise.data import NO_TARGET, Data, Order, open_data, prepare, read_windows, validation_windows
from shardwise.spec import InputError

TEXT = {"a.txt": "alpha\nbeta\n", "b.txt": "gamma delta\n", "c.txt": "ε ζ\n", "d.txt": "omega\n" * 9}


def prepared(tmp_path: Path, shard_tokens: int = 7, fraction: float = 0.0) -> Data:
    source = tmp_path / "source"
    source.mkdir()
    for name, text in TEXT.items():
        (source / name).write_text(text, encoding="utf-8")
    prepare(source, tmp_path / "out", validation_fraction=fraction, shard_tokens=shard_tokens)
    return open_data(tmp_path / "out")


def all_tokens() -> list[int]:
    return [token for _, text in sorted(TEXT.items()) for token in [*text.encode(), 256]]


@pytest.mark.parametrize("shard_tokens", [1, 2, 7, 30, 1000])
def test_reads_cross_shards(tmp_path: Path, shard_tokens: int) -> None:
    data, expected = prepared(tmp_path, shard_tokens), all_tokens()
    assert data.train.tokens == len(expected)
    assert len(data.index.train.files) == -(-len(expected) // shard_tokens)
    assert data.train.read(0, len(expected)).dtype == np.int64
    for start, stop in ((0, len(expected)), (0, 0), (5, 23), (len(expected) - 1, len(expected)), (len(expected),) * 2):
        assert data.train.read(start, stop).tolist() == expected[start:stop]
    for start, stop in ((-1, 2), (3, 2), (0, len(expected) + 1)):
        with pytest.raises(IndexError):
            data.train.read(start, stop)


@pytest.mark.parametrize("shard_tokens", [1, 7, 1000])
@pytest.mark.parametrize("sequence", [1, 5, 8, 200])
def test_every_target_exactly_once_an_epoch(tmp_path: Path, shard_tokens: int, sequence: int) -> None:
    data, expected = prepared(tmp_path, shard_tokens), np.array(all_tokens())
    order = Order(data.train.tokens, sequence, batch_sequences=3, seed=0)
    n = order.epoch_windows
    seen = np.zeros(len(expected), dtype=int)
    for step in range(n):  # n steps of 3 samples are 3 epochs
        windows = order.windows(step)
        inputs, labels = read_windows(data.train, windows, sequence, vocabulary=257)
        assert inputs.shape == labels.shape == (3, sequence) and inputs.dtype == labels.dtype == np.int64
        real = labels != NO_TARGET
        assert real.sum() == order.targets(step)
        assert (inputs[~real] == 0).all()
        positions = windows[:, None] * sequence + np.arange(sequence)
        assert (inputs[real] == expected[positions[real]]).all()
        assert (labels[real] == expected[positions[real] + 1]).all()
        np.add.at(seen, positions[real] + 1, 1)
    assert seen[0] == 0 and (seen[1:] == 3).all()


def test_more_shards_than_stay_mapped(tmp_path: Path) -> None:
    data = prepared(tmp_path, shard_tokens=1)
    assert len(data.index.train.files) > 64
    for _ in range(2):
        assert data.train.read(0, data.train.tokens).tolist() == all_tokens()


def test_an_id_outside_the_vocabulary_names_the_shard(tmp_path: Path) -> None:
    data = prepared(tmp_path)
    with pytest.raises(InputError, match=r"train-00001\.npy: token 4 has id 256, outside the vocabulary of 256"):
        read_windows(data.train, np.array([0, 1]), 10, vocabulary=256)  # alpha\nbeta\n is 11 bytes
    assert data.train.locate(7) == (tmp_path / "out" / "train-00001.npy", 0)  # the first token of a shard


def test_a_window_outside_the_stream(tmp_path: Path) -> None:
    data = prepared(tmp_path)
    for window in (-1, 1000):
        with pytest.raises(IndexError, match=f"window {window} of"):
            read_windows(data.train, np.array([window]), 10, vocabulary=257)


def test_validation_windows() -> None:
    assert validation_windows(1001, 10, 55).tolist() == [0, 1, 2, 3, 4]
    assert validation_windows(1001, 10, 3).tolist() == [0]
    assert len(validation_windows(1001, 10, 10**9)) == 100
    assert len(validation_windows(1002, 10, 10**9)) == 101
    for tokens, limit in ((0, 100), (1, 100), (1001, 0)):
        assert validation_windows(tokens, 10, limit).tolist() == []
