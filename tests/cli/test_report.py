"""What whole runs leave behind: events, the report, verdicts; and dashboards that misbehave."""

import json
import signal

import pytest
import yaml

from jobs import finish, launch_patched, metrics, shardwise, start, wait_for_steps, write_run

KILL_AT_STEP_6 = "step == 6 and os.kill(os.getpid(), signal.SIGKILL)"


def journal(out, name):
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def kinds(out):
    return [(event["event"], event["step"]) for event in journal(out, "events")]


def train(*words, code=0):
    found, output = shardwise("train", *words)
    assert found == code, output
    return output


def test_a_run_that_is_stopped_and_continued(tmp_path):
    out, run = tmp_path / "run", write_run(tmp_path, steps=3000, evaluation={"every": 2, "tokens": 64})
    process = start("train", run, "--nproc", "2", "--out", out)
    wait_for_steps(process, out, 3)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 4, output
    done = metrics(out)[-1]["step"]
    page = (out / "report.html").read_text()
    assert f"ended after step {done}: SIGTERM" in page
    assert kinds(out)[0] == ("start", 0) and kinds(out)[-1] == ("stop", done)

    # Continued on another number of ranks, for some steps more.
    process = start("train", run, "--nproc", "1", "--out", out)
    wait_for_steps(process, out, done + 4)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 4, output
    events = journal(out, "events")
    (resumed,) = [event for event in events if event["event"] == "resume"]
    assert resumed["step"] == done
    assert (resumed["world"], resumed["device"], resumed["layout"]) == (1, "CPU", "one rank, zero 0, micro_batch 8")
    assert all(event["seconds"] >= 0 for event in events)
    assert [event["step"] for event in events] == sorted(event["step"] for event in events)
    evaluated = [event["step"] for event in events if event["event"] == "evaluation"]
    assert evaluated == [line["step"] for line in journal(out, "evaluations")]
    assert (out / "report.html").read_text().count('class="mark"') == 5  # charts


def test_a_killed_session_is_told_from_one_that_stopped(tmp_path):
    out, run = tmp_path / "run", write_run(tmp_path, checkpoint={"every": 4, "keep": 10, "asynchronous": False})
    code, output = launch_patched(KILL_AT_STEP_6, 1, "train", run, "--out", out, "--layout", "{micro_batch: 8}")
    assert code == 3, output
    assert not (out / "report.html").exists()
    train(run, "--nproc", "1", "--out", out)
    assert kinds(out) == [
        ("start", 0), ("save", 4), ("resume", 4), ("save", 8), ("save", 12), ("evaluation", 12), ("stop", 12),
    ]  # fmt: skip
    page = (out / "report.html").read_text()
    assert "1 session ended without a word" in page and "done with step 12" in page


def test_a_run_whose_loss_is_not_finite_leaves_a_report(tmp_path):
    out = tmp_path / "run"
    train(
        write_run(tmp_path), "--nproc", "1", "--out", out, "--recipe.optimizer", "{name: sgd, lr: 1e30, clip: 0}",
        code=3,
    )  # fmt: skip
    assert journal(out, "events")[-1]["reason"].startswith("step ")
    assert "gradient norm" in (out / "report.html").read_text()


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path):
    out = tmp_path / "run"
    (out / "report.html").mkdir(parents=True)
    (out / "report.html" / "in-the-way").touch()
    output = train(write_run(tmp_path), "--nproc", "1", "--out", out)
    assert output.count("report.html was not written: ") == 1
    assert "done: 12 steps" in output


# A dashboard that leaves everything behind that could keep a process alive.
_STUCK = """
import atexit, sys, threading
from shardwise.report import background, loggers
class Stuck:
    def __init__(self, out):
        for_ever = threading.Event().wait
        atexit.register(for_ever)
        threading.Thread(target=for_ever).start()  # not a daemon: Python itself would wait for it
        print("built", flush=True)
        for_ever()
loggers.LOGGERS["tensorboard"] = Stuck
background._CLOSE_SECONDS = 2.0
from shardwise.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_hanging_dashboard_does_not_keep_the_process_alive(tmp_path):
    driver = (
        "import sys; from shardwise.launching import launch\n"
        f"sys.exit(launch([sys.executable, '-c', {_STUCK!r}, *sys.argv[1:]], 2, say=print, how_to_continue=''))"
    )
    words = ("train", write_run(tmp_path, steps=2), "--out", tmp_path / "run", "--layout", "{dp_replicate: 2}")
    code, output = finish(start(*words, "--log", "tensorboard", launcher=("-c", driver)))
    assert code == 0, output
    assert "built" in output
    assert "--log tensorboard did not finish within 2 s and is left behind" in output
    assert "done: 2 steps" in output
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("words", [("--log", "wandb"), ("--log", "tensorboard", "--log", "trackio")])
def test_a_dashboard_that_is_not_installed_is_refused_early(tmp_path, words):
    try:
        __import__(words[-1])
    except ImportError:
        output = train(write_run(tmp_path), "--out", tmp_path / "run", *words, code=2)
        assert f"pip install 'shardwise[{words[-1]}]'" in output
        assert not (tmp_path / "run").exists()
    else:
        pytest.skip(f"{words[-1]} is installed")


def bands(path, *points):
    found = [{"tokens": step * 256, "loss": loss, "tolerance": tolerance} for step, loss, tolerance in points]
    path.write_text(yaml.safe_dump({"name": "made up", "source": "nobody", "points": found}))
    return path


def test_expected_losses(tmp_path):
    """Inside: 0. Outside, before a kill and a resume: 1 at the end, although the run finishes and saves."""
    recipe = {"evaluation": {"every": 4, "tokens": 512}, "checkpoint": {"every": 4, "keep": 10, "asynchronous": False}}
    run, out = write_run(tmp_path, **recipe), tmp_path / "run"
    wide = bands(tmp_path / "wide.yaml", (4, 5.8, 1.0), (12, 5.8, 1.0))
    tight = bands(tmp_path / "tight.yaml", (4, 1.0, 0.1), (5, 5.8, 1.0), (12, 5.8, 1.0))
    output = train(run, "--nproc", "2", "--out", tmp_path / "wide", "--expect", wide)
    assert output.count(": inside") == 3
    assert "validation loss inside its band at 3 of 3 evaluations" in output

    words = ("train", run, "--out", out, "--layout", "{micro_batch: 8}", "--expect", tight)
    code, output = launch_patched(KILL_AT_STEP_6, 1, *words)
    assert code == 3
    assert "at 1,024 tokens: expected 1.0000 ± 0.1: OUTSIDE" in output
    output = train(run, "--nproc", "2", "--out", out, "--expect", tight, code=1)
    assert "validation loss OUTSIDE its band at 1 of 3 evaluations: step 4" in output
    assert "done: 12 steps" in output and kinds(out)[-1] == ("stop", 12)
    assert [line["inside"] for line in journal(out, "evaluations")] == [False, True, True]
    assert "OUTSIDE" in (out / "report.html").read_text()

    # A finished run can be judged again, by other bands.
    train(run, "--nproc", "1", "--out", out, "--expect", wide)
    assert [line["inside"] for line in journal(out, "evaluations")] == [True, True, True]


def test_ranks_that_torchrun_started_return_1_themselves(tmp_path):
    tight = bands(tmp_path / "tight.yaml", (2, 1.0, 0.1), (12, 1.0, 0.1))
    environment = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    process = start("train", write_run(tmp_path), "--out", tmp_path / "run", "--expect", tight, **environment)
    code, output = finish(process)
    assert code == 1, output


def test_mistaken_bands_are_found_before_a_rank_starts(tmp_path):
    late = bands(tmp_path / "late.yaml", (1000, 1.0, 0.1))
    output = train(write_run(tmp_path), "--nproc", "1", "--out", tmp_path / "run", "--expect", late, code=2)
    assert "this Run is never evaluated between 256K and 256K tokens" in output
    assert not (tmp_path / "run" / "run.yaml").exists()
