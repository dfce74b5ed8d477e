"""Hugging Face data sets, with a stand-in for the library: what is asked of it, and what is made of its answers."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from test_data_sources import read, texts

from shardwise.data import documents as documents_module
from shardwise.data import prepare
from shardwise.spec import InputError

ROWS: list[Any] = ["one", "two", None, "", "three ü", "four"]


class Dataset:
    """As much of datasets.Dataset as is used."""

    def __init__(self, columns: dict[str, list[Any]], fingerprint: str = "f1"):
        self._columns, self._fingerprint = columns, fingerprint
        self.column_names = list(columns)
        self.data = types.SimpleNamespace(nbytes=sum(len(str(value)) for value in columns["text"]) if columns else 0)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def select_columns(self, names: list[str]) -> "Dataset":
        return Dataset({name: self._columns[name] for name in names} | {"text": self._columns["text"]})

    def __getitem__(self, place: slice) -> dict[str, list[Any]]:
        return {name: values[place] for name, values in self._columns.items()}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """What load_dataset and load_from_disk return is set by the test; what they are asked is recorded."""
    asked: list[tuple[Any, ...]] = []
    library = types.SimpleNamespace(answer=Dataset({"id": list(range(6)), "text": ROWS}), asked=asked)

    def load(*arguments: Any, **options: Any) -> Any:
        asked.append((*arguments, *options.values()))
        if isinstance(library.answer, Exception):
            raise library.answer
        return library.answer

    module = types.ModuleType("datasets")
    module.load_dataset = module.load_from_disk = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "datasets" or find_spec(name))
    return library


@pytest.mark.parametrize(
    ("place", "asked"),
    [
        ("hf:name", ("name", None, None)),
        ("hf:some/name:config", ("some/name", "config", None)),
        ("hf:some/name@train[:1%]", ("some/name", None, "train[:1%]")),
        ("hf:some/name:sample-10BT@train", ("some/name", "sample-10BT", "train")),
    ],
)
@pytest.mark.parametrize("piece", [1, 10, 1000])
def test_the_hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    library: types.SimpleNamespace,
    place: str,
    asked: tuple[Any, ...],
    piece: int,
) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", piece)
    lines: list[str] = []
    assert read(place, tmp_path / "out", say=lines.append) == ["one", "two", "three ü", "four"]
    assert library.asked == [asked]  # loaded once
    assert lines[0] == "left out: 2 empty"


def test_a_saved_data_set_in_a_tree(tmp_path: Path, library: types.SimpleNamespace) -> None:
    source = tmp_path / "source"
    (source / "saved" / "train").mkdir(parents=True)
    (source / "saved" / "train" / "state.json").write_text("{}")
    (source / "saved" / "train" / "dataset_info.json").write_text("{}")
    (source / "a.txt").write_text("text")
    assert read(source, tmp_path / "out") == ["text", "one", "two", "three ü", "four"]
    assert library.asked == [(str(source / "saved" / "train"),)]


def test_splits(tmp_path: Path, library: types.SimpleNamespace) -> None:
    one, two = library.answer, Dataset({"text": ["other"]})
    library.answer = {"train": one, "test": two}
    assert len(read("hf:name", tmp_path / "1")) == 4
    library.answer = {"test": two}
    assert read("hf:name", tmp_path / "2") == ["other"]
    library.answer = {"test": two, "dev": one}
    with pytest.raises(InputError, match="hf:name: has the splits dev, test; name one of them, such as hf:name@dev"):
        read("hf:name", tmp_path / "3")


def test_other_content_is_prepared_anew(tmp_path: Path, library: types.SimpleNamespace) -> None:
    prepare("hf:name", tmp_path / "out", validation_fraction=0)
    library.answer = Dataset({"text": ["changed"]}, "f2")
    with pytest.raises(InputError, match="already holds data prepared from other text"):
        prepare("hf:name", tmp_path / "out", validation_fraction=0)
    assert texts(tmp_path / "out") == ["one", "two", "three ü", "four"]


def test_faults(tmp_path: Path, library: types.SimpleNamespace) -> None:
    with pytest.raises(InputError, match=r"hf:name: has no column 'txt'; did you mean 'text'\? It has: id, text"):
        read("hf:name", tmp_path / "out", text_field="txt")
    library.answer = Dataset({"text": ["good", 7, "\ud800"]})
    with pytest.raises(InputError, match=r"hf:name, row 2: field 'text' is of type int"):
        read("hf:name", tmp_path / "out")
    assert read("hf:name", tmp_path / "out", skip_bad=True) == ["good"]
    library.answer = ConnectionError("no route\nmore")
    with pytest.raises(
        InputError, match=r"hf:x: cannot be loaded: the Hugging Face Hub cannot be reached \(no route\)$"
    ):
        read("hf:x", tmp_path / "other")
    library.answer = ValueError("BuilderConfig 'x' not found.\nAvailable: …")
    with pytest.raises(InputError, match=r"hf:x: cannot be loaded: BuilderConfig 'x' not found\.$"):
        read("hf:x", tmp_path / "other")
