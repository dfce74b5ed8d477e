"""What people see, and destinations that must never matter to the run."""

import threading
import time

import pytest

from shardwise.report import loggers
from shardwise.report.loggers import Background, require_loggers
from shardwise.report.progress import ProgressLine, step_line
from shardwise.spec import InputError, Step

STEP = Step(
    step=3, tokens=3000, loss=2.5, grad_norm=0.5, lr=1e-3, loss_scale=None, step_seconds=0.1, tokens_per_second=10_000.0,
    mfu=0.412,
    mfu_full_attention=0.43, hfu=0.412, peak_memory_gib=1.5, data_wait_fraction=0.25,
)  # fmt: skip


def test_step_line():
    line = step_line(STEP, 10)
    assert line == (
        "step 3/10  loss 2.5000  grad_norm 0.500  lr 1.00e-03  10K tokens/s  mfu 41.2%  1.50 GiB  input wait 25%"
    )


def test_plain_lines_when_not_a_terminal(capsys):
    with ProgressLine(10, shown=True) as progress:
        progress.step(STEP, first=True)
        progress.step(STEP)  # within two seconds of the first: not shown
        progress.say("[bold]plain[/bold]")
    assert capsys.readouterr().out.splitlines() == [step_line(STEP, 10), "[bold]plain[/bold]"]


def test_other_ranks_say_nothing(capsys):
    with ProgressLine(10, shown=False) as progress:
        progress.step(STEP, first=True)
        progress.say("hello")
    assert capsys.readouterr().out == ""


class Remembers:
    records: list = []  # noqa: RUF012

    def __init__(self, out):
        self.records.clear()

    def log(self, step, values):
        self.records.append((step, values))

    def close(self):
        self.records.append("closed")


class Raises(Remembers):
    def log(self, step, values):
        raise OSError("no route to host")


class Hangs(Remembers):
    def log(self, step, values):
        threading.Event().wait()


def test_numbers_reach_a_logger(monkeypatch, tmp_path):
    monkeypatch.setitem(loggers.LOGGERS, "memory", Remembers)
    background = Background(("memory",), tmp_path, print)
    background.log(STEP.dump() | {"mfu": None})
    background.close()
    (step, values), closed = Remembers.records
    assert step == 3
    assert values["loss"] == 2.5
    assert "mfu" not in values
    assert closed == "closed"


def test_a_raising_logger_is_switched_off(monkeypatch, tmp_path):
    monkeypatch.setitem(loggers.LOGGERS, "broken", Raises)
    said = []
    background = Background(("broken",), tmp_path, said.append)
    for _ in range(5):
        background.log(STEP.dump())
    background.close()
    assert said == ["--log broken is off from here on: OSError: no route to host"]


def test_a_hanging_logger_neither_blocks_nor_grows(monkeypatch, tmp_path):
    monkeypatch.setitem(loggers.LOGGERS, "stuck", Hangs)
    monkeypatch.setattr(loggers, "_CLOSE_SECONDS", 0.1)
    background = Background(("stuck",), tmp_path, print)
    for _ in range(loggers._WAITING_RECORDS * 2):
        background.log(STEP.dump())
    background.close()  # returns although the logger never will
    assert background._lines[0][1].qsize() <= loggers._WAITING_RECORDS


def test_tensorboard_writes_event_files(tmp_path):
    background = Background(("tensorboard",), tmp_path, print)
    background.log(STEP.dump())
    background.close()
    deadline = time.monotonic() + 30
    while not list((tmp_path / "tensorboard").glob("events.*")) and time.monotonic() < deadline:
        time.sleep(0.1)  # importing tensorboard may outlast the close
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_unknown_and_missing_loggers_are_refused_early(monkeypatch):
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        require_loggers(("tensorbord",))
    monkeypatch.setitem(loggers.LOGGERS, "absent", Remembers)
    monkeypatch.setitem(loggers._PACKAGES, "absent", "no_such_package")
    with pytest.raises(InputError, match=r"pip install 'shardwise\[absent\]'"):
        require_loggers(("absent",))
