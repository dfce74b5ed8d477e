"""Every fault of prepared data, and of preparing it, is one clear message and leaves nothing behind."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data import check_vocabulary, open_data, prepare
from shardwise.data import encode as encode_module
from shardwise.data import shards as shards_module
from shardwise.data.documents import Options
from shardwise.data.files import File
from shardwise.data.prepare import prepare_sources
from shardwise.data.sources import Sources
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.spec import InputError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    for number in range(20):
        (directory / f"{number:02d}.txt").write_text(f"document {number}\n" * 20)
    return directory


@pytest.fixture
def out(tmp_path: Path, source: Path) -> Path:
    prepare(source, tmp_path / "out", validation_fraction=0.2, shard_tokens=2000)
    return tmp_path / "out"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def edit(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((out / "index.json").read_text())
    change(index)
    (out / "index.json").write_text(json.dumps(index))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing index": (
        lambda out: (out / "index.json").unlink(),
        "is not prepared data: it has no index.json; write it",
    ),
    "index not JSON": (lambda out: (out / "index.json").write_text("{"), "index.json: is not valid JSON"),
    "index not UTF-8": (lambda out: (out / "index.json").write_bytes(b"\xff\xfe\xff"), "index.json: is not valid JSON"),
    "index not a mapping": (lambda out: (out / "index.json").write_text("[]"), "index.json: has format None"),
    "index a directory": (
        lambda out: ((out / "index.json").unlink(), (out / "index.json").mkdir()),
        "index.json: cannot be read",
    ),
    "wrong version": (
        lambda out: edit(out, lambda index: index.update(format=2)),
        "index.json: has format 2, and this version reads 1; prepare the data again",
    ),
    "unknown key": (lambda out: edit(out, lambda index: index.update(extra=1)), "index.json.*unknown field 'extra'"),
    "name that leaves the directory": (
        lambda out: edit(out, lambda index: index["train"]["files"][0].update(name="../x/train-00000.npy")),
        r"index.json.train.files.0.name: String should match",
    ),
    "no train files": (
        lambda out: edit(out, lambda index: index["train"].update(files=[])),
        "index.json: train has no tokens",
    ),
    "empty shard in the index": (
        lambda out: edit(out, lambda index: index["train"]["files"][0].update(tokens=0)),
        r"train.files.0.tokens: Input should be greater than or equal to 1",
    ),
    "missing shard": (
        lambda out: (out / "train-00001.npy").unlink(),
        r"train-00001.npy: cannot be read: No such file.*restore it or prepare",
    ),
    "truncated shard": (
        lambda out: os.truncate(out / "train-00001.npy", 500),
        r"train-00001.npy: is truncated: 500 bytes, 4,128 in the index; restore it or prepare again",
    ),
    "empty shard": (lambda out: os.truncate(out / "train-00000.npy", 0), "train-00000.npy: is truncated: 0 bytes"),
    "longer shard": (
        lambda out: os.truncate(out / "validation-00000.npy", 10**5),
        r"validation-00000.npy: is too long: 100,000 bytes",
    ),
    "corrupt shard": (
        lambda out: flip(out / "train-00001.npy", 300),
        "train-00001.npy: is corrupt: its SHA-256 differs",
    ),
    "corrupt header": (lambda out: flip(out / "train-00001.npy", 0), "train-00001.npy: is not a readable .npy array"),
    "wrong dtype": (
        lambda out: np.save(out / "train-00000.npy", np.zeros(2000, dtype=np.int16)),
        r"train-00000.npy: holds int16 \[2000\], the index says uint16 \[2000\]",
    ),
    "wrong shape": (
        lambda out: np.save(out / "train-00000.npy", np.zeros((2, 1000), dtype=np.uint16)),
        r"train-00000.npy: holds uint16 \[2, 1000\]",
    ),
    "missing token_bytes": (lambda out: (out / "token_bytes.npy").unlink(), "token_bytes.npy: cannot be read"),
    "corrupt token_bytes": (lambda out: flip(out / "token_bytes.npy", 200), "token_bytes.npy: is corrupt"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(out: Path, name: str) -> None:
    damage, message = FAULTS[name]
    open_data(out)
    damage(out)
    with pytest.raises(InputError, match=message) as caught:
        open_data(out)
    assert str(out) in str(caught.value)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent: no such directory; write it with `shardwise data prepare`"):
        open_data(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file: no such directory"):
        open_data(tmp_path / "file")


def test_large_data_is_opened_without_hashing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(out / "train-00001.npy", 300)
    monkeypatch.setattr(shards_module, "VERIFIED_BYTES", 1000)
    open_data(out)


def test_a_shard_that_vanishes_while_it_is_read(out: Path) -> None:
    data = open_data(out)
    (out / "train-00000.npy").unlink()
    with pytest.raises(InputError, match=r"train-00000\.npy: cannot be read"):
        data.train.read(0, 10)


def test_vocabulary(out: Path) -> None:
    data = open_data(out)
    check_vocabulary(data, 257)
    with pytest.raises(
        InputError, match=r"the data holds token id 256; model\.vocabulary is 100; it must be at least 257"
    ):
        check_vocabulary(data, 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation_fraction": 1.0}, r"validation_fraction: at least 0 and below 1 is expected \(it was 1.0\)"),
        ({"validation_fraction": -0.1}, "validation_fraction"),
        ({"validation_fraction": float("nan")}, "validation_fraction"),
        ({"shard_tokens": 0}, r"shard_tokens: at least 1 is expected \(it was 0\)"),
        ({"tokenizer": "absent.json"}, "tokenizer absent.json: cannot be read"),
    ],
)
def test_bad_arguments(tmp_path: Path, source: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare(source, tmp_path / "out", **arguments)
    assert names(tmp_path) == ["source"]


def test_bad_sources(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    before = names(tmp_path)
    for name, message in {
        "absent": "absent: no such file or directory",
        "empty": "empty: holds no text$",
        "image.png": r"image.png: holds no text; left out: 1 not text: image.png \(binary: it has NUL bytes\)",
        "pipe": "pipe: is neither a file nor a directory",
        "loop": "loop: no such file or directory",
    }.items():
        with pytest.raises(InputError, match=message):
            prepare(tmp_path / name, tmp_path / "out")
        assert names(tmp_path) == before


def test_outputs_that_are_taken(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(InputError, match=f"{name}: exists and is not prepared data"):
            prepare(source, tmp_path / name)
    with pytest.raises(InputError, match=r"below: cannot be written: .*; nothing was left there"):
        prepare(source, tmp_path / "file" / "below")
    for inside in (source, source / "out"):
        with pytest.raises(InputError, match="lies inside the source"):
            prepare(source, inside)
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "thing").read_text() == "mine"
    assert names(tmp_path) == ["file", "full", "source"]


@pytest.mark.parametrize("call", range(1, 10))
def test_full_disk(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """The disk fills up at the call-th sync: of a piece, a shard, what is noted of them, or the index."""
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    lines: list[str] = []
    left = "; nothing was left there" if call == 1 else "$"
    with pytest.raises(InputError, match=f"out: cannot be written: No space left on device{left}"):
        prepare(source, tmp_path / "out", shard_tokens=4000, say=lines.append)
    assert calls == call
    assert names(tmp_path) == (["source"] if call == 1 else [".out.partial", "source"])
    assert (lines[-1:] == []) if call == 1 else lines[-1].endswith(".out.partial, and is continued by the same command")
    prepare(source, tmp_path / "out", shard_tokens=4000)
    open_data(tmp_path / "out")
    assert names(tmp_path) == ["out", "source"]
    prepare(source, tmp_path / "straight", shard_tokens=4000)
    for path in (tmp_path / "straight").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_an_interrupt_before_any_text_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(encode_module, "read_span", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out")
    assert names(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("other\n"), "03.txt: changed while it was being read; prepare again"),
        (lambda path: path.unlink(), "03.txt: cannot be read: No such file"),
    ],
    ids=["rewritten", "removed"],
)
def test_a_source_that_changes_while_it_is_read(
    tmp_path: Path, source: Path, change: Callable[[Path], Any], message: str
) -> None:
    class Changing(Sources):
        def __iter__(self) -> Iterator[File]:
            passes.append(1)
            for file in super().__iter__():
                if len(passes) == 2 and file.name == "03.txt":
                    change(Path(file.path))
                yield file

    passes: list[int] = []
    with pytest.raises(InputError, match=message):
        prepare_sources(Changing((str(source),)), tmp_path / "out", ByteTokenizer(), Options())
    assert names(tmp_path) == ["source"]
