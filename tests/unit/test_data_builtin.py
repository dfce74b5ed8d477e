"""The built-in data: cached, safe to prepare from several processes, and clear where it cannot be written."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from shardwise.data import builtin as builtin_module
from shardwise.data import builtin_data, open_data, resolve_data
from shardwise.data.output import UnwritableError
from shardwise.spec import InputError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the standard library."""
    root = tmp_path / "lib"
    for name in ("a.py", "json/b.py", "test/c.py", "json/tests/d.py", "site-packages/e.py", "idlelib/idle_test/f.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / "notes.txt").write_text("not Python\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_what_is_in_it(tmp_path: Path, library: Path) -> None:
    data = open_data(builtin_data(tmp_path / "cache"))
    assert data.index.train.documents + data.index.validation.documents == 2
    text = "".join(data.tokenizer.decode(part.read(0, part.tokens)) for part in (data.train, data.validation))
    assert sorted(text.splitlines()) == ["# a.py", "# json/b.py"]


def test_it_is_prepared_once(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builtin_data(tmp_path / "cache")
    monkeypatch.setattr(builtin_module, "prepare_sources", None)
    assert builtin_data(tmp_path / "cache") == first


def test_where_the_cache_is(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHARDWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert builtin_data().parent == tmp_path / "home" / ".cache" / "shardwise"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert builtin_data().parent == tmp_path / "xdg" / "shardwise"
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "own"))
    assert resolve_data("builtin").parent == tmp_path / "own"


def test_a_cache_that_cannot_be_written(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match=r"cannot be written: .*; set SHARDWISE_CACHE to a directory"):
        builtin_data()


def test_a_lost_race_uses_the_winner(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winner = builtin_data(tmp_path / "winner")
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if not target.exists():
            real(winner, target)  # the other process is a moment faster
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    directory = builtin_data(tmp_path / "cache")
    open_data(directory)
    assert list((tmp_path / "cache").iterdir()) == [directory]


def test_a_race_lost_to_other_data_is_an_error(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        target.mkdir()
        (target / "thing").touch()
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(InputError, match="exists and is not prepared data") as caught:
        builtin_data(tmp_path / "cache")
    assert not isinstance(caught.value, UnwritableError)


def test_several_processes_at_once_and_no_torch(tmp_path: Path) -> None:
    """The real standard library, from three processes that start together."""
    program = (
        "import sys; from shardwise.data import open_data, resolve_data\n"
        "data = open_data(resolve_data('builtin')); assert 'torch' not in sys.modules\n"
        "print(data.name, data.fingerprint, data.train.tokens > 10**6, data.validation.tokens > 10**4)"
    )
    environment = {**os.environ, "SHARDWISE_CACHE": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs) == 1 and outputs.pop().endswith("True True\n")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_resolve_data(tmp_path: Path) -> None:
    assert resolve_data(str(tmp_path)) == tmp_path
    with pytest.raises(InputError, match="no directory 'bultin'; did you mean 'builtin'"):
        resolve_data("bultin")
    for name in ("/absent", "~no-such-user/data"):
        with pytest.raises(InputError, match=f"no directory '{name}'; give 'builtin' or a prepared directory"):
            resolve_data(name)
