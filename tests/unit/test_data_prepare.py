"""prepare: what is read, what is held out, what is written."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from shardwise.data import DataIndex, open_data, prepare
from shardwise.data import assemble as assemble_module
from shardwise.data import documents as documents_module
from shardwise.data.holdout import hold_out
from shardwise.spec import InputError


def tree(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def texts(directory: Path, split: str) -> list[bytes]:
    """The documents of a split, read back."""
    stream = getattr(open_data(directory), split)
    ids = stream.read(0, stream.tokens)
    ends = np.flatnonzero(ids == 256)
    assert not len(ids) or ends[-1] == len(ids) - 1
    return [part[part < 256].astype(np.uint8).tobytes() for part in np.split(ids, ends + 1)[:-1]]


def many(count: int) -> dict[str, bytes | str]:
    return {f"{number:03d}.txt": f"document {number}\n" * (number % 5 + 1) for number in range(count)}


def test_a_tree_in_the_order_of_its_paths(tmp_path: Path) -> None:
    source = tree(
        tmp_path / "source",
        {
            "b.txt": "b",
            "a/z.txt": "az",
            "a/b/c.txt": "abc",
            "a.txt": "a.",
            "Z.md": "Z",
            ".git/config": "hidden",
            "a/__pycache__/x.py": "cache",
            "empty.txt": "",
            "no-suffix": "ünï\r\n",
        },
    )
    lines: list[str] = []
    index = prepare(source, tmp_path / "out", validation_fraction=0, say=lines.append)
    assert texts(tmp_path / "out", "train") == [x.encode() for x in ("Z", "abc", "az", "a.", "b", "ünï\r\n")]
    assert index.train.documents == 6
    assert (index.validation.documents, index.validation.files) == (0, ())
    assert any("left out: 1 empty" in line for line in lines)


def test_binary_files_are_left_out_and_named(tmp_path: Path) -> None:
    source = tree(
        tmp_path / "source",
        {
            "a.txt": "text\n",
            "b.png": b"\x89PNG\0\0",
            "c.txt": b"caf\xe9\n",
            "d.txt": b"cut \xf0\x9f\x98",
            "e.txt": "ok",
        },
    )
    lines: list[str] = []
    index = prepare(source, tmp_path / "out", validation_fraction=0, say=lines.append)
    assert texts(tmp_path / "out", "train") == [b"text\n", b"ok"]
    assert index.train.documents == 2
    assert any(
        "3 not text: b.png (binary: it has NUL bytes), c.txt (not valid UTF-8), d.txt (not valid UTF-8)" in line
        for line in lines
    )


def test_links_are_followed_but_loops_are_not(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"a/one.txt": "one", "z.txt": "z"})
    tree(tmp_path / "elsewhere", {"two.txt": "two"})
    (source / "a" / "up").symlink_to(source)
    (source / "again").symlink_to(source / "a")
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    (source / "linked.txt").symlink_to(source / "z.txt")
    (source / "broken").symlink_to(source / "nothing")
    (source / "self").symlink_to("self")
    os.mkfifo(source / "pipe")
    prepare(source, tmp_path / "out", validation_fraction=0)
    assert texts(tmp_path / "out", "train") == [b"one", b"two", b"z", b"z"]


def test_long_documents_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 16)
    contents = [
        "line\n" * 40,
        "no line end 😀 at all " * 9,
        "x" * 16,
        "é" * 33 + "\n",
        "short\n\n\nlines\n" * 7 + "end",
    ]
    source = tree(tmp_path / "source", {f"{i}.txt": text for i, text in enumerate(contents)})
    tree(source, {"5.txt": b"fine so far\n" * 5 + b"\xff"})  # found out only in a later piece
    index = prepare(source, tmp_path / "out", validation_fraction=0, shard_tokens=50)
    assert texts(tmp_path / "out", "train") == [text.encode() for text in contents]
    assert index.train.documents == 5


def test_held_out_documents_are_whole_and_never_trained_on(tmp_path: Path) -> None:
    files = many(200)
    files |= {f"copy/{name}": content for name, content in files.items()}
    index = prepare(tree(tmp_path / "source", files), tmp_path / "out", validation_fraction=0.2)
    train, validation = texts(tmp_path / "out", "train"), texts(tmp_path / "out", "validation")
    assert not set(train) & set(validation)  # copies fall on the same side
    assert sorted(train + validation) == sorted(str(content).encode() for content in files.values())
    assert 40 < len(validation) < 120  # 80 expected
    for split, documents in ((index.train, train), (index.validation, validation)):
        assert split.documents == len(documents)
        assert split.text_bytes == sum(map(len, documents)) == sum(file.text_bytes for file in split.files)
        assert split.tokens == split.text_bytes + split.documents


def test_a_document_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    small, large = many(100), many(200)
    prepare(tree(tmp_path / "small", small), tmp_path / "out-small", validation_fraction=0.2)
    prepare(tree(tmp_path / "large", large), tmp_path / "out-large", validation_fraction=0.2)
    assert set(texts(tmp_path / "out-small", "validation")) <= set(texts(tmp_path / "out-large", "validation"))


@pytest.mark.parametrize("fraction", [1e-9, 0.01, 0.5, 0.999999])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_both_sides_hold_a_document(tmp_path: Path, count: int, fraction: float) -> None:
    index = prepare(tree(tmp_path / "source", many(count)), tmp_path / "out", validation_fraction=fraction)
    assert index.train.documents >= 1 and index.validation.documents >= 1
    assert index.train.documents + index.validation.documents == count


def test_a_forced_hold_out_is_not_most_of_the_text() -> None:
    keys = np.array([2**63, 2**63 + 1, 2**63 + 2], dtype=np.uint64)  # none is below 1 %
    sizes = np.array([10**9, 10**7, 10**3], dtype=np.uint64)
    assert hold_out(keys, sizes, 0.01).tolist() == [False, True, False]
    assert hold_out(keys[:0], sizes[:0], 0.01).tolist() == []
    assert hold_out(keys, sizes, 0).tolist() == [False] * 3
    assert hold_out(keys[[0, 0]], sizes[[0, 0]], 0.01).tolist() == [False] * 2


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("piece", [16, 1 << 20])
def test_one_document_gives_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int, piece: int
) -> None:
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", piece)
    text = "".join(f"line {number}\n" for number in range(1000)).encode()
    source = tree(tmp_path / "source", {f"{number}.txt": text for number in range(copies)})
    index = prepare(source, tmp_path / "out", validation_fraction=0.05)
    train, validation = texts(tmp_path / "out", "train"), texts(tmp_path / "out", "validation")
    assert train[0] + validation[0] == text and len(set(train)) == len(set(validation)) == 1
    assert train[0].endswith(b"\n") and 0.05 <= len(validation[0]) / len(text) < 0.051
    for split, documents in ((index.train, train), (index.validation, validation)):
        assert (split.documents, split.text_bytes) == (copies, sum(map(len, documents)))


@pytest.mark.parametrize(
    ("text", "tail"),
    [("one\ntwo", "two"), ("one\ntwo\n", "two\n"), ("a\n" + "b" * 99, "b" * 99), ("b" * 99 + "\na", "a"), ("\nx", "x")],
)
@pytest.mark.parametrize("piece", [2, 1 << 20])
def test_the_tail_is_at_least_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, tail: str, piece: int
) -> None:
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", piece)
    (tmp_path / "text").write_text(text)
    prepare(tmp_path / "text", tmp_path / "out", validation_fraction=0.01)
    assert texts(tmp_path / "out", "validation") == [tail.encode()]
    assert texts(tmp_path / "out", "train") == [text.removesuffix(tail).encode()]


@pytest.mark.parametrize("text", ["one line", "one line\n"])
def test_a_single_line_has_no_validation_and_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "text").write_text(text)
    lines: list[str] = []
    index = prepare(tmp_path / "text", tmp_path / "out", say=lines.append)
    assert index.validation.tokens == index.validation.documents == open_data(tmp_path / "out").validation.tokens == 0
    assert texts(tmp_path / "out", "train") == [text.encode()]
    assert any(line.startswith("no validation") for line in lines)


def test_the_same_source_gives_the_same_files_anywhere(tmp_path: Path) -> None:
    for place in ("one", "two"):
        prepare(tree(tmp_path / place / "source", many(30)), tmp_path / place / "out", shard_tokens=100)
    one, two = tmp_path / "one" / "out", tmp_path / "two" / "out"
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir()) and "train-00000.npy" in names
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert open_data(one).fingerprint == open_data(two).fingerprint


def test_the_fingerprint_follows_the_tokens(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", many(30))
    prints = {
        open_data(tmp_path / out).fingerprint
        for out, fraction in (("a", 0.3), ("b", 0.0))
        if prepare(source, tmp_path / out, validation_fraction=fraction)
    }
    tree(source, {"000.txt": "changed"})
    prepare(source, tmp_path / "c", validation_fraction=0)
    assert len(prints | {open_data(tmp_path / "c").fingerprint}) == 3


def test_shards_are_plain_npy_as_the_index_says(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", many(20))
    index = prepare(source, tmp_path / "out", validation_fraction=0, shard_tokens=64)
    files = index.train.files
    assert [file.tokens for file in files[:-1]] == [64] * (len(files) - 1) and 1 <= files[-1].tokens <= 64
    for number, file in enumerate(files):
        path = tmp_path / "out" / file.name
        array = np.load(path)
        assert file.name == f"train-{number:05d}.npy" and array.dtype == np.uint16
        assert (len(array), path.stat().st_size, int(array.max())) == (file.tokens, file.bytes, file.largest_id)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    assert DataIndex.load(index.dump()) == index


def test_existing_output(tmp_path: Path) -> None:
    source, out = tree(tmp_path / "source", many(5)), tmp_path / "out"
    out.mkdir()  # an empty directory is a free place
    first = prepare(source, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    lines: list[str] = []
    assert prepare(source, out, say=lines.append) == first
    assert "is reused" in lines[-1]
    for arguments in ({"validation_fraction": 0.5}, {"shard_tokens": 3}):
        with pytest.raises(InputError, match="already holds data prepared from other text, or with another"):
            prepare(source, out, **arguments)
    tree(source, {"new.txt": "new"})
    with pytest.raises(InputError, match="choose another directory or remove it"):
        prepare(source, out)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_an_existing_output_that_is_damaged_is_not_reused(tmp_path: Path) -> None:
    source, out = tree(tmp_path / "source", many(5)), tmp_path / "out"
    prepare(source, out)
    (out / "train-00000.npy").unlink()
    with pytest.raises(InputError, match=r"train-00000\.npy"):
        prepare(source, out)


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("shard_tokens", [1, 17, 10_000])
def test_shards_are_written_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, shard_tokens: int
) -> None:
    monkeypatch.setattr(assemble_module, "_BLOCK", block)
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 100)
    source = tree(tmp_path / "source", {f"{number}": f"{number}\n" * (number % 5 + 1) for number in range(30)})
    prepare(source, tmp_path / "out", validation_fraction=0.3, shard_tokens=shard_tokens, workers=1)
    train, validation = texts(tmp_path / "out", "train"), texts(tmp_path / "out", "validation")
    assert 3 < len(validation) < 20
    expected = sorted(path.read_bytes() for path in source.iterdir())
    assert sorted(train + validation) == expected
