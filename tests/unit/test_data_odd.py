"""Odd and broken input: named, with its line, before anything is half-written; or left out and counted."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from test_data_sources import jsonl, read, write_parquet

from shardwise.data import documents as documents_module
from shardwise.data import prepare
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.spec import InputError

GOOD = b'{"text": "good"}\n'
LONG = "0123456789 " * 3000


def broken(kind: str, content: bytes) -> bytes:
    """Compressed and then cut short."""
    compressed = gzip.compress(content) if kind == "gzip" else zstandard.compress(content)
    return compressed[:-5]


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "not JSON": (b'{"text": "a\n', "not JSON: Invalid control character at column 12"),
    "not JSON at all": (b"hello\n", "not JSON: Expecting value at column 1"),
    "two on a line": (GOOD.strip() + GOOD, "not JSON: Extra data"),
    "no object": (b'["text"]\n', "is a JSON list; an object with field 'text' is expected"),
    "no field": (b'{"txt": "a", "id": 1}\n', r"has no field 'text'; did you mean 'txt'\? It has: txt, id"),
    "empty object": (b"{}\n", r"has no field 'text'\. It has: none"),
    "a number": (b'{"text": 3}\n', "field 'text' is of type int; a text is expected"),
    "not UTF-8": (b'{"text": "caf\xe9"}\n', "not valid UTF-8 at its byte 14"),
    "half a pair": (b'{"text": "\\ud800"}\n', "half of a surrogate pair"),
    "a huge number": (b'{"text": ' + b"1" * 5000 + b"}\n", "cannot be read as JSON"),
    "nested": (b"[" * 100_000 + b"\n", "cannot be read as JSON"),
    "too long": (b'{"text": "' + b"x" * 200_000 + b'"}\n', "longer than 150,000 bytes"),
}


@pytest.mark.parametrize("pieces", [1, 6])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pieces: int) -> None:
    line, message = BAD_LINES[name]
    content = GOOD * 10 + b"\n" + line + GOOD * 3
    monkeypatch.setattr(documents_module, "RECORD_BYTES", 150_000)
    monkeypatch.setattr(documents_module, "PIECE_BYTES", len(content) // pieces)
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.jsonl:12: .*{message}"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
    lines: list[str] = []
    assert read(tmp_path / "a.jsonl", tmp_path / "out", skip_bad=True, say=lines.append) == ["good"] * 13
    left_out = next(line for line in lines if line.startswith("left out: 1 bad: "))
    assert "a.jsonl:12 (" in left_out


def test_many_bad_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 200)
    (tmp_path / "a.jsonl").write_bytes((GOOD + b"bad\n") * 50)
    lines: list[str] = []
    assert len(read(tmp_path / "a.jsonl", tmp_path / "out", skip_bad=True, say=lines.append)) == 50
    assert lines[0].startswith(f"left out: 50 bad: {tmp_path}/a.jsonl:2 (the line is not JSON")
    assert lines[0].endswith("…") and lines[0].count("a.jsonl:") == 5


DAMAGED: dict[str, tuple[bytes, str]] = {
    "a.jsonl.gz": (broken("gzip", jsonl([LONG] * 3)), r"a\.jsonl\.gz:\d: its gzip data is truncated"),
    "a.jsonl.zst": (broken("zstd", jsonl([LONG] * 3)), r"a\.jsonl\.zst:\d: its zstd data is truncated"),
    "a.txt.gz": (broken("gzip", LONG.encode()), r"a\.txt\.gz: its gzip data is truncated"),
    "a.txt.zst": (broken("zstd", LONG.encode()), r"a\.txt\.zst: its zstd data is truncated"),
    "b.txt.gz": (gzip.compress(b"text")[:-8] + bytes(8), r"b\.txt\.gz: its gzip data is damaged: CRC"),
    "c.txt.gz": (gzip.compress(b"text") + b"garbage", r"c\.txt\.gz: its gzip data is damaged: Not a gzipped file"),
    "b.txt.zst": (zstandard.compress(b"text") + b"garbage", r"b\.txt\.zst: its zstd data is damaged"),
    "d.txt.gz": (b"text", r"d\.txt\.gz: its name says gzip, but the file starts with b'text'"),
    "e.txt.gz": (zstandard.compress(b"text"), r"e\.txt\.gz: its name says gzip, but the file is zstd"),
    "d.txt.zst": (b"text", r"d\.txt\.zst: its name says zstd, but the file starts with b'text'"),
    "f.txt.gz": (b"", r"f\.txt\.gz: its name says gzip, but the file is empty"),
    "a.jsonl": (gzip.compress(GOOD), r"a\.jsonl: its name says JSON lines, but the file is gzip"),
    "a.parquet": (b"text", r"a\.parquet: its name says parquet, but the file starts with b'text'"),
    "b.parquet": (b"", r"b\.parquet: its name says parquet, but the file is empty"),
    "c.parquet": (b"PAR1 and no more", r"c\.parquet: its Parquet data is truncated or damaged"),
    "a.parquet.gz": (gzip.compress(b"PAR1"), r"a\.parquet\.gz: Parquet is compressed inside"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    content, message = DAMAGED[name]
    (source / name).write_bytes(content)
    (source / "z.txt").write_text("good")
    with pytest.raises(InputError, match=message):
        prepare(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["source"]
    lines: list[str] = []
    found = read(source, tmp_path / "out", skip_bad=True, say=lines.append)
    assert found[-1] == "good" and set(found) <= {"good", LONG}
    assert any(line.startswith("left out: 1 bad: ") and name in line for line in lines)


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_truncated_parquet(tmp_path: Path, cut: float) -> None:
    write_parquet(tmp_path / "a.parquet", [LONG] * 9, row_group_size=3)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: int(len(content) * cut)])
    with pytest.raises(InputError, match=r"a\.parquet: its Parquet data is truncated or damaged"):
        prepare(tmp_path / "a.parquet", tmp_path / "out")


def test_parquet_with_damaged_pages(tmp_path: Path) -> None:
    """The footer is right, so it is only found while rows are read."""
    texts = [f"{number} {LONG}" for number in range(9)]
    write_parquet(tmp_path / "a.parquet", texts, row_group_size=3, use_dictionary=False, compression="none")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    place = content.index(b"4 012")
    content[place - 60 : place + 60] = b"\xff" * 120
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet, row \d: its Parquet data is truncated or damaged"):
        prepare(tmp_path / "a.parquet", tmp_path / "out")


def test_parquet_columns_that_are_wrong(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"txt": ["a"], "n": [1]}), tmp_path / "a.parquet")
    for field, message in {
        "text": r"has no column 'text'; did you mean 'txt'\? It has: txt, n",
        "n": "column 'n' holds int64; text is expected",
        "txt.a": "has no column 'txt.a'",
    }.items():
        with pytest.raises(InputError, match=rf"a\.parquet: {message}"):
            prepare(tmp_path / "a.parquet", tmp_path / "out", text_field=field)


def test_invalid_utf8_in_parquet(tmp_path: Path) -> None:
    column = pyarrow.array([b"good", b"caf\xe9", b"good"], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet, row 2: field 'text' is not valid UTF-8 at its byte 4"):
        prepare(tmp_path / "a.parquet", tmp_path / "out")
    assert read(tmp_path / "a.parquet", tmp_path / "out", skip_bad=True) == ["good", "good"]


def test_marks_line_ends_and_nul(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_bytes(b"\xef\xbb\xbfmarked\r\n")
    (source / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\\u0000b"}\r\n\r\n{"text": "c\\r\\n"}\r\n')
    (source / "c.txt").write_bytes(b"\xef\xbb\xbf")
    (source / "d.txt").write_bytes(b"t\0e\0x\0t\0")
    (source / "e.txt").write_bytes("UTF-16".encode("utf-16"))
    (source / "f.jsonl").write_bytes(b"")
    (source / "g.txt").write_bytes(b"")
    lines: list[str] = []
    assert read(source, tmp_path / "out", say=lines.append) == ["marked\r\n", "a\0b", "c\r\n"]
    assert lines[0] == (
        "left out: 2 empty; 2 not text: d.txt (binary: it has NUL bytes), e.txt (binary: it has NUL bytes)"
    )


def test_a_line_without_an_end_is_read_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 10_000)
    seen: list[int] = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: seen.append(len(text)) or encode(self, text))
    (tmp_path / "a.txt").write_text("x" * 123_456)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "y" * 123_456}))
    for name in ("a.txt", "b.jsonl"):
        assert read(tmp_path / name, tmp_path / f"out-{name}", workers=1) == [
            name[0].replace("a", "x").replace("b", "y") * 123_456
        ]
    assert max(seen) <= 2000 and sum(seen) == 2 * 123_456


def test_a_record_whose_text_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "RECORD_BYTES", 1000)
    write_parquet(tmp_path / "a.parquet", ["good", "x" * 1001])
    with pytest.raises(InputError, match=r"a\.parquet, row 2: field 'text' is longer than 1,000 bytes"):
        prepare(tmp_path / "a.parquet", tmp_path / "out")


def test_finished_pieces_survive_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 30 + b"bad \n" + GOOD * 2)
    (tmp_path / "z.txt").write_text("last")
    sources: list[Path] = [path, tmp_path / "z.txt"]
    lines: list[str] = []
    with pytest.raises(InputError, match=r"a\.jsonl:31: "):
        prepare(sources, tmp_path / "out", say=lines.append, workers=1)
    assert lines[-1] == f"what is finished is kept in {tmp_path}/.out.partial, and is continued by the same command"
    repaired: Callable[[], int] = lambda: path.write_bytes(GOOD * 33)  # noqa: E731
    repaired()  # the file is another one now, so its pieces are made again
    assert read(sources, tmp_path / "out") == ["good"] * 33 + ["last"]
    assert not (tmp_path / ".out.partial").exists()
