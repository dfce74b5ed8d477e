"""Dashboards, which must never matter to the run."""

import sys
import threading
import time
import types

import pytest

from shardwise.report import background, loggers
from shardwise.report.background import Background
from shardwise.report.loggers import dashboard_name, require_loggers
from shardwise.spec import InputError

RECORD = {"step": 3, "loss": 2.5, "mfu": None, "inside": True, "kind": "text"}


class Remembers:
    def __init__(self, out):
        self.records = []
        Remembers.last = self

    def log(self, step, values):
        self.records.append((step, values))

    def close(self):
        self.records.append("closed")


def wait_for_ever(*_):
    threading.Event().wait()


def fail(*_):
    raise OSError("no route to host")


def run_logger(monkeypatch, tmp_path, records=5, **methods):
    """Feed a logger whose methods are replaced; returns what was said, and the logger's thread."""
    monkeypatch.setitem(loggers.LOGGERS, "odd", type("Odd", (Remembers,), methods))
    monkeypatch.setattr(background, "_CLOSE_SECONDS", 0.2)
    said = []
    feed = Background(("odd",), tmp_path, said.append)
    for _ in range(records):
        feed.log("train", RECORD)
    feed.close()
    return said, feed


def test_numbers_reach_a_logger(monkeypatch, tmp_path):
    monkeypatch.setitem(loggers.LOGGERS, "memory", Remembers)
    feed = Background(("memory",), tmp_path, print)
    feed.log("train", RECORD)
    feed.log("validation", {"step": 3, "loss": 2.7})
    feed.close()
    assert Remembers.last.records == [(3, {"train/loss": 2.5}), (3, {"validation/loss": 2.7}), "closed"]


@pytest.mark.parametrize("method", ["__init__", "log", "close"])
def test_a_failing_logger_is_switched_off(monkeypatch, tmp_path, method):
    said, feed = run_logger(monkeypatch, tmp_path, **{method: fail})
    assert said == ["--log odd is off from here on: OSError: no route to host"]
    assert not feed._threads["odd"].is_alive()


@pytest.mark.parametrize("method", ["__init__", "log", "close"])
def test_a_logger_that_exits_ends_only_itself(monkeypatch, tmp_path, method):
    said, _ = run_logger(monkeypatch, tmp_path, **{method: lambda *_: sys.exit(7)})
    assert said == ["--log odd is off from here on: SystemExit: 7"]


@pytest.mark.parametrize("method", ["__init__", "log", "close"])
def test_a_hanging_logger_is_left_behind(monkeypatch, tmp_path, method):
    said, feed = run_logger(monkeypatch, tmp_path, **{method: wait_for_ever})
    assert said == ["--log odd did not finish within 0.2 s and is left behind"]
    assert feed._threads["odd"].daemon


def test_a_hanging_logger_neither_blocks_nor_grows(monkeypatch, tmp_path):
    _, feed = run_logger(monkeypatch, tmp_path, records=background._WAITING_RECORDS * 2, log=wait_for_ever)
    assert feed._queues["odd"].qsize() <= background._WAITING_RECORDS


def test_one_that_hangs_does_not_take_the_others_time(monkeypatch, tmp_path):
    monkeypatch.setitem(loggers.LOGGERS, "stuck", type("Stuck", (Remembers,), {"__init__": wait_for_ever}))
    monkeypatch.setitem(loggers.LOGGERS, "memory", Remembers)
    monkeypatch.setattr(background, "_CLOSE_SECONDS", 1.0)
    feed = Background(("stuck", "memory"), tmp_path, print)
    feed.log("train", RECORD)
    feed.close()
    assert Remembers.last.records == [(3, {"train/loss": 2.5}), "closed"]


def test_tensorboard_files_are_written(tmp_path):
    feed = Background(("tensorboard",), tmp_path, print)
    feed.log("train", RECORD)
    feed.close()
    deadline = time.monotonic() + 30
    while not list((tmp_path / "tensorboard").glob("events.*")) and time.monotonic() < deadline:
        time.sleep(0.1)  # importing tensorboard may outlast the close
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_unknown_and_missing_loggers_are_refused_early(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        require_loggers(("tensorbord",))
    monkeypatch.setitem(loggers.LOGGERS, "no_such_package", Remembers)
    with pytest.raises(InputError, match=r"pip install 'shardwise\[no_such_package\]'"):
        require_loggers(("no_such_package",))
    # What wandb leaves in the current directory is importable, but not wandb.
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="not installed"):
        require_loggers(("no_such_package",))


def fake_package(monkeypatch, name):
    """A stand-in for wandb or trackio that remembers how it was called."""
    calls = []

    def init(**options):
        calls.append(("init", options))
        return types.SimpleNamespace(
            log=lambda *values, **options: calls.append(("log", *values, options)),
            finish=lambda: calls.append(("finish",)),
            define_metric=lambda *_, **options: calls.append(("define_metric", options)),
        )

    settings = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=init, Settings=settings))
    return calls


@pytest.fixture
def out(tmp_path):
    out = tmp_path / "first"
    out.mkdir()
    (out / "run.yaml").write_text("model: tiny-gpt\n")
    (out / "events.jsonl").write_text('{"event": "start", "step": 0, "time": "2026-08-05T09:00:00+00:00"}\n')
    return out


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_continues_its_dashboard(monkeypatch, out, name):
    for variable in ("WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_NAME", "WANDB_DIR", "TRACKIO_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    calls = fake_package(monkeypatch, name)
    for _ in range(2):
        logger = loggers.LOGGERS[name](out)
        logger.log(3, {"train/loss": 2.5})
        logger.close()
        with (out / "events.jsonl").open("a") as file:
            file.write('{"event": "resume", "step": 3}\n')
    first, second = (call[1] for call in calls if call[0] == "init")
    key = "id" if name == "wandb" else "name"
    assert first[key] == second[key] == dashboard_name(out)
    assert first["resume"] == "allow"
    assert first["project"] == "shardwise"
    assert first["config"] == {"model": "tiny-gpt"}
    assert next(call for call in calls if call[0] == "log")[1]["train/loss"] == 2.5
    assert calls.count(("finish",)) == 2


def test_their_own_variables_win(monkeypatch, out):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "called so")
    calls = fake_package(monkeypatch, "wandb")
    loggers.LOGGERS["wandb"](out)
    options = calls[0][1]
    assert (options["project"], options["name"]) == ("mine", "called so")
    assert options["settings"].console == "off"


def test_a_run_started_afresh_in_the_same_place_is_another_one(out):
    before = dashboard_name(out)
    (out / "events.jsonl").write_text('{"event": "start", "step": 0, "time": "2026-08-06T09:00:00+00:00"}\n')
    assert dashboard_name(out) != before
    assert dashboard_name(out).startswith("first-")
