"""Any number of workers and any interruption: the same bytes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_data_tokenizer import byte_level

from shardwise.data import Progress, WorkerDied, open_data, prepare
from shardwise.data import documents as documents_module
from shardwise.data import work as work_module
from shardwise.data.encode import Setup
from shardwise.data.workers import run_jobs
from shardwise.spec import InputError

SECONDS = 60


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Many pieces: small files, lines, and a text file of several pieces."""
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 500)
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 2000)
    monkeypatch.setattr(work_module, "_WORTH_A_WORKER", 1000)
    directory = tmp_path / "source"
    directory.mkdir()
    for number in range(20):
        (directory / f"{number:02d}.txt").write_text(f"the quick brown document {number}\n" * (number % 7 + 1))
    lines = [json.dumps({"text": f"line {number} of the lazy dog\n" * (number % 5)}) for number in range(200)]
    (directory / "lines.jsonl").write_text("\n".join(lines))
    (directory / "long.txt").write_text("".join(f"naïve café – line {number}\n" for number in range(400)))
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def expected(tmp_path: Path, source: Path) -> dict[str, bytes]:
    byte_level(tmp_path / "tokenizer.json")
    prepare(source, tmp_path / "expected", tmp_path / "tokenizer.json", shard_tokens=1000, workers=1)
    open_data(tmp_path / "expected")
    return content(tmp_path / "expected")


def again(tmp_path: Path, source: Path, **options: Any) -> dict[str, bytes]:
    prepare(source, tmp_path / "out", tmp_path / "tokenizer.json", shard_tokens=1000, **options)
    assert not list(tmp_path.glob(".*"))
    return content(tmp_path / "out")


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers(tmp_path: Path, source: Path, expected: dict[str, bytes], workers: int) -> None:
    seen: list[Progress] = []
    assert again(tmp_path, source, workers=workers, progress=seen.append) == expected
    for stage, unit in (("reading", "B"), ("writing", "tokens")):
        last = [progress for progress in seen if progress.stage == stage][-1]
        assert (last.done, last.unit) == (last.total, unit)
    size = sum(path.stat().st_size for path in source.iterdir())
    assert next(progress.total for progress in seen) == size
    documents = open_data(tmp_path / "out").index
    assert documents is not None
    assert max(p.documents for p in seen) == documents.train.documents + documents.validation.documents


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stage", ["reading", "writing"])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_an_interrupted_preparation_continues(
    tmp_path: Path, source: Path, expected: dict[str, bytes], workers: int, stage: str, share: float
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.stage == stage and progress.done > share * progress.total:
            raise KeyboardInterrupt

    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        again(tmp_path, source, workers=workers, progress=interrupt, say=lines.append)
    assert "is continued by the same command" in lines[-1]
    assert not (tmp_path / "out").exists()
    seen: list[Progress] = []
    assert again(tmp_path, source, workers=3 - workers, progress=seen.append, say=lines.append) == expected
    assert any(line.startswith("continuing: ") for line in lines)
    last = [progress for progress in seen if progress.stage == stage][-1]
    assert last.before > (share / 2) * last.total and last.done == last.total


def test_a_source_that_is_given_twice(tmp_path: Path, source: Path) -> None:
    """Its pieces are encoded once, by one worker, and read twice."""
    for workers in (1, 3):
        prepare([source, source], tmp_path / f"{workers}", validation_fraction=0, workers=workers)
    prepare(source, tmp_path / "once", validation_fraction=0, workers=1)
    once, twice = open_data(tmp_path / "once").train, open_data(tmp_path / "1").train
    assert twice.read(0, twice.tokens).tolist() == once.read(0, once.tokens).tolist() * 2  # type: ignore[union-attr]
    assert content(tmp_path / "1") == content(tmp_path / "3")


def test_other_settings_reuse_what_is_finished(
    tmp_path: Path, source: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How documents are divided can still be changed; other text or another tokenizer makes other pieces."""

    def interrupt(progress: Progress) -> None:
        if progress.stage == "writing":
            raise KeyboardInterrupt

    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out", tmp_path / "tokenizer.json", shard_tokens=100, workers=1, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        again(tmp_path, source, validation_fraction=0.5, workers=1, progress=interrupt, say=lines.append)
    pieces = lines[0].removeprefix("continuing: ").split()[0]
    assert lines[0] == f"continuing: {pieces} of {pieces} pieces are finished already"
    assert again(tmp_path, source, workers=1) == expected


def test_a_killed_preparation_continues(tmp_path: Path) -> None:
    """SIGKILL in the middle, with real workers; none of them stays behind."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(10):
        (source / f"{number}.txt").write_text(f"{number} " * 4_000_000)
    (source / "last.txt").write_text("end")
    words = [sys.executable, "-m", "shardwise", "data", "prepare", str(source), "--workers", "2", "-o"]
    process = subprocess.Popen([*words, str(tmp_path / "out")], stdout=subprocess.DEVNULL)
    work, deadline = tmp_path / ".out.partial", time.monotonic() + SECONDS
    while len(list(work.glob("*.npz"))) < 2 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    finished = {path.name for path in work.glob("*.npz")}
    assert finished
    output = subprocess.run([*words, str(tmp_path / "out")], capture_output=True, text=True, check=True).stdout
    assert "continuing: " in output
    subprocess.run([*words, str(tmp_path / "straight")], check=True, stdout=subprocess.DEVNULL)
    assert content(tmp_path / "out") == content(tmp_path / "straight")
    assert not work.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in range(20):
        (source / f"{name}.txt").write_text("x\n" * 4_000_000)
    words = [sys.executable, "-m", "shardwise", "data", "prepare", str(source), "-o", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*words, "--workers", "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )
    deadline = time.monotonic() + SECONDS
    while len(list(tmp_path.glob(".out.partial/*.npz"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 4
    assert "interrupted; the same command continues" in output and "Traceback" not in output
    assert f"what is finished is kept in {tmp_path}/.out.partial" in output
    assert not (tmp_path / "out").exists()


def test_an_error_in_a_worker_is_the_same_error(tmp_path: Path, source: Path) -> None:
    (source / "lines.jsonl").write_text('{"text": "a"}\n' * 1000 + "bad\n")
    with pytest.raises(InputError, match=r"lines\.jsonl:1001: the line is not JSON"):
        prepare(source, tmp_path / "out", workers=2)
    assert not (tmp_path / "out").exists()


def kill_yourself(setup: Setup, tick: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_wrong(setup: Setup, tick: Any) -> None:
    raise ZeroDivisionError("wrong")


def fill_the_disk(setup: Setup, tick: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_workers_that_die_or_are_wrong(tmp_path: Path) -> None:
    setup = Setup(tmp_path, documents_module.Options(), None)
    with pytest.raises(WorkerDied, match=r"ended by SIGKILL; if memory ran out, use fewer --workers"):
        run_jobs([kill_yourself], setup, 2, lambda *_: None)
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process:.*ZeroDivisionError: wrong"):
        run_jobs([be_wrong, be_wrong], setup, 2, lambda *_: None)
    with pytest.raises(OSError, match="No space left on device"):
        run_jobs([fill_the_disk], setup, 2, lambda *_: None)


def test_one_process_at_a_time(tmp_path: Path, source: Path) -> None:
    def second(progress: Progress) -> None:
        with pytest.raises(InputError, match="out: another process is preparing data there"):
            prepare(source, tmp_path / "out", workers=1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out", workers=1, progress=second)


def test_bad_numbers_of_workers(tmp_path: Path, source: Path) -> None:
    with pytest.raises(InputError, match=r"workers: at least 1 is expected \(it was 0\)"):
        prepare(source, tmp_path / "out", workers=0)
