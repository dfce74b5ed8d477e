"""Sources: every format gives the same documents, in a fixed order."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from shardwise.data import documents as documents_module
from shardwise.data import files as files_module
from shardwise.data import open_data, prepare
from shardwise.spec import InputError

TEXTS = ["one\n", "zwei äöü", "three\r\nthree", "nul \0 inside", "", "fünf 😀\n" * 30]


def texts(directory: Path) -> list[str]:
    """The documents of the train split, read back."""
    stream = open_data(directory).train
    ids = stream.read(0, stream.tokens)
    parts = np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]
    return [part[part < 256].astype(np.uint8).tobytes().decode() for part in parts]


def read(sources: object, out: Path, **options: object) -> list[str]:
    prepare(sources, out, **{"validation_fraction": 0, "workers": 1, **options})  # type: ignore[arg-type]
    return texts(out)


def jsonl(values: list[str]) -> bytes:
    return b"".join(json.dumps({"id": 7, "text": text}, ensure_ascii=False).encode() + b"\n" for text in values)


def write_parquet(path: Path, values: list[str | None], **options: object) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(values)), "text": values}), path, **options)


FORMATS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(TEXTS)),
    "a.NDJSON": lambda path: path.write_bytes(jsonl(TEXTS).removesuffix(b"\n")),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(TEXTS[:3])) + gzip.compress(jsonl(TEXTS[3:]))),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(jsonl(TEXTS))),
    "a.jsonl.zst": lambda path: path.write_bytes(
        zstandard.compress(jsonl(TEXTS[:1])) + zstandard.compress(jsonl(TEXTS[1:]))
    ),
    "a.parquet": lambda path: write_parquet(path, TEXTS, row_group_size=2),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("piece", [20, 200, 1 << 23])
def test_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int) -> None:
    """The same documents, however small the pieces are."""
    monkeypatch.setattr(documents_module, "PIECE_BYTES", piece)
    FORMATS[name](tmp_path / name)
    assert read(tmp_path / name, tmp_path / "out") == [text for text in TEXTS if text]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_text_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: Callable) -> None:
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 16)
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 32)
    suffix = ".gz" if compress is gzip.compress else ".zst"
    text = "no line end 😀 at all " * 9 + "\n" + "line\n" * 50
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(text.encode()))
    (tmp_path / f"b.md{suffix}").write_bytes(compress(b"second"))
    (tmp_path / f"c{suffix}").write_bytes(compress(b"binary \0"))
    lines: list[str] = []
    source = str(tmp_path / f"*{suffix}")
    assert read(source, tmp_path / "out", say=lines.append) == [text, "second"]
    assert lines[0] == f"left out: 1 not text: c{suffix} (binary: it has NUL bytes)"


def test_a_directory_may_mix_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a.txt").write_text("text")
    (source / "b.jsonl").write_bytes(jsonl(["line 1", "line 2"]))
    (source / "package.json").write_text('{"a": 1}')  # no JSON lines
    write_parquet(source / "sub" / "c.parquet", ["row"])
    (source / "sub" / "d.py.gz").write_bytes(gzip.compress(b"code"))
    assert read(source, tmp_path / "out") == ["text", "line 1", "line 2", '{"a": 1}', "row", "code"]


def test_several_sources_and_patterns(tmp_path: Path) -> None:
    for name in ("c.txt", "a.txt", "b.md", "x[1].txt", "deep/er/z.txt"):
        (tmp_path / "s" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "s" / name).write_text(name)
    source = tmp_path / "s"
    assert read([source / "b.md", str(source / "*.txt")], tmp_path / "1") == ["b.md", "a.txt", "c.txt", "x[1].txt"]
    assert read(str(source / "x[1].txt"), tmp_path / "2") == ["x[1].txt"]  # a name, not a pattern
    assert read(str(source / "**" / "z.txt"), tmp_path / "3") == ["deep/er/z.txt"]
    with pytest.raises(InputError, match=r"s/\*\.csv: nothing matches this pattern"):
        read(str(source / "*.csv"), tmp_path / "4")
    with pytest.raises(InputError, match="lies inside the source"):
        read([source / "a.txt", source / "deep"], source / "deep" / "out")


def test_nested_and_other_fields(tmp_path: Path) -> None:
    records = [{"data": {"body": "x"}, "text": "-"}, {"data.body": "y"}, {"data": {"body": None}}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert read(tmp_path / "a.jsonl", tmp_path / "1", text_field="data.body") == ["x", "y"]
    table = pyarrow.table({"data": [{"body": "x", "n": 1}, None, {"body": None, "n": 2}, {"body": "y", "n": 3}]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", tmp_path / "2", text_field="data.body") == ["x", "y"]


@pytest.mark.parametrize("kind", ["large_string", "binary", "large_binary", "dictionary"])
def test_columns_of_text(tmp_path: Path, kind: str) -> None:
    string = pyarrow.string()
    of = pyarrow.dictionary(pyarrow.int32(), string) if kind == "dictionary" else getattr(pyarrow, kind)()
    column = pyarrow.array(["a", "ü", None], string).cast(of)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", tmp_path / "out") == ["a", "ü"]


@pytest.mark.parametrize("size", range(40, 60))
def test_ranges_of_lines_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Each line belongs to one range, wherever the ranges' edges fall."""
    lines = ["", "a", "bb" * 30, "c\u00e9", "", "d" * 11, "e"]
    content = b"\r\n".join(json.dumps({"text": text}).encode() if text else b"" for text in lines * 5)
    (tmp_path / "a.jsonl").write_bytes(content)
    monkeypatch.setattr(documents_module, "PIECE_BYTES", size)
    assert read(tmp_path / "a.jsonl", tmp_path / "out") == [text for text in lines * 5 if text]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 1000])
def test_parts_of_a_large_text_file_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int, mark: bytes
) -> None:
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 16)
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 16 * chunks)
    contents = ["line\n" * 40, "no line end 😀 at all " * 9, "x" * 48, "é" * 33 + "\n", "a\n\n\nb\n" * 7 + "end"]
    for number, text in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(mark + text.encode())
    (tmp_path / "5.txt").write_bytes(
        mark + b"fine so far\n" * 5 + b"\xff" + b"and on\n" * 9
    )  # left out with all its parts
    (tmp_path / "6.txt").write_bytes(b"\0" * 100)
    lines: list[str] = []
    assert read(str(tmp_path / "*.txt"), tmp_path / "out", say=lines.append) == contents
    assert lines[0] == "left out: 2 not text: 5.txt (not valid UTF-8), 6.txt (binary: it has NUL bytes)"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"text"))
    for name, extra in (("a.parquet", "parquet"), ("a.txt.zst", "zstd"), ("hf:name", "datasets")):
        source = name if ":" in name else tmp_path / name
        with pytest.raises(InputError, match=rf"{name}: needs a package .* pip install 'shardwise\[{extra}\]'"):
            prepare(source, tmp_path / "out")
