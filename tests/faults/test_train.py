"""Whole training runs that are stopped, broken and continued."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from jobs import SECONDS, finish, launch_patched, metrics, shardwise, start, trajectory, wait_for_steps, write_run


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("straight")
    code, output = shardwise("train", write_run(out), "--nproc", "2", "--out", out / "run")
    assert code == 0, output
    return out / "run"


def checkpoints(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def children(process):
    """Process ids of the children, from Linux's /proc."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if (fields := stat(path)) and fields[1] == str(process.pid)
    ]


def state(number):
    """'R', 'S', 'Z' …; None where there is no such process."""
    fields = stat(Path(f"/proc/{number}/stat"))
    return fields[0] if fields else None


def stat(path):
    """State, parent, … of a process; None where it has just ended."""
    try:
        return path.read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def test_a_finished_run_left_everything(straight):
    assert [line["step"] for line in metrics(straight)] == list(range(1, 13))
    assert metrics(straight)[-1]["tokens"] == 12 * 256
    assert checkpoints(straight) == ["step-00000004", "step-00000008", "step-00000012"]
    evaluations = [json.loads(line) for line in (straight / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["tokens"]) for line in evaluations] == [(12, 512)]


def test_extending_a_finished_run_equals_a_longer_run(straight, tmp_path):
    """With a constant rate, so that the schedule does not depend on the length."""
    run = write_run(tmp_path, schedule={"name": "constant"})
    for words in (["--recipe.steps", "6", "--out", "a"], ["--out", "a"], ["--out", "b"]):
        words[-1] = tmp_path / words[-1]
        code, output = shardwise("train", run, "--nproc", "1", *words)
        assert code == 0, output
    assert trajectory(tmp_path / "a") == trajectory(tmp_path / "b")


def test_killed_then_continued_is_identical(straight, tmp_path):
    """SIGKILL of everything at step 6: the lines after the checkpoint of step 4 are dropped and made again."""
    out = tmp_path / "run"
    run = write_run(tmp_path, checkpoint={"every": 4, "keep": 10, "asynchronous": False})
    code, output = launch_patched("step == 6 and os.kill(os.getpid(), signal.SIGKILL)", 2, "train", run, "--out", out)
    assert code == 3
    assert "killed by SIGKILL" in output
    code, output = shardwise("train", run, "--nproc", "2", "--out", out)
    assert code == 0, output
    assert "continuing after step 4" in output
    assert trajectory(out) == trajectory(straight)


@pytest.mark.parametrize("when", ["torch is being imported", "steps are running"])
def test_sigterm_saves_and_says_how_to_continue(tmp_path, when):
    out = tmp_path / "run"
    process = start("train", write_run(tmp_path, steps=3000), "--nproc", "2", "--out", out)
    if when == "steps are running":
        wait_for_steps(process, out, 3)
    while len(children(process)) < 2:
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 4, output
    assert f"--out {out}" in output.splitlines()[-1]
    done = metrics(out)[-1]["step"]
    assert f"stopped after step {done} of 3000" in output
    assert f"step-{done:08d}" in checkpoints(out)


def test_sigterm_during_evaluation_does_not_wait_for_it(tmp_path):
    out = tmp_path / "run"
    run = write_run(tmp_path, steps=2, evaluation={"tokens": "400K"})  # some 1,500 micro-batches
    process = start("train", run, "--nproc", "1", "--out", out)
    wait_for_steps(process, out, 2)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 4, output
    assert (out / "evaluations.jsonl").read_text() == ""
    code, output = shardwise("train", run, "--nproc", "1", "--out", out, "--recipe.evaluation.tokens", "400K")
    assert code == 0, output
    assert "all 2 steps were trained already" in output
    assert json.loads((out / "evaluations.jsonl").read_text())["step"] == 2


def test_a_failing_rank_names_itself_and_the_others_end(tmp_path):
    out = tmp_path / "run"
    run = write_run(tmp_path, checkpoint={"every": 4, "asynchronous": False})
    code, output = launch_patched(
        "if rank == 1 and step == 6: raise RuntimeError('the card fell out')", 2,
        "train", run, "--out", out, "--layout.dp_shard", "2", "--layout.micro_batch", "4",
    )  # fmt: skip
    assert code == 3
    assert output.count("rank 1 (dp_shard 1) failed: RuntimeError: the card fell out") == 1
    assert "rank 0 (" not in output
    assert checkpoints(out)[0] == "step-00000004"
    assert len(metrics(out)) == 5


def test_a_loss_that_is_not_finite_ends_the_run_unsaved(tmp_path):
    out = tmp_path / "run"
    code, output = shardwise(
        "train", write_run(tmp_path), "--nproc", "1", "--out", out,
        "--recipe.optimizer", "{name: sgd, lr: 1e30, clip: 0}",
    )  # fmt: skip
    assert code == 3
    assert "TrainingError: step" in output
    assert "step-00000012" not in checkpoints(out)


def test_a_full_disk_costs_the_checkpoint_not_the_run(tmp_path):
    """Every file larger than 16 KiB fails, as on a full disk; metrics still fit."""
    out = tmp_path / "run"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384)) if step == 5 else None"
    run = write_run(tmp_path, checkpoint={"every": 4, "asynchronous": False})
    code, output = launch_patched(limit, 1, "train", run, "--out", out, "--layout", "{micro_batch: 8}")
    assert code == 3, output
    assert "checkpoint of step 8 was not saved" in output
    assert "step-00000004" in output
    assert len(metrics(out)) == 12
    assert checkpoints(out) == ["step-00000004"]


def test_torchrun_workers_exit_with_0_after_a_stop(tmp_path):
    """torchrun itself reports 1 after SIGTERM (docs/stopping.md); what counts is that the state was saved."""
    out = tmp_path / "run"
    process = start(
        "--standalone", "--nproc-per-node", "2", "-m", "shardwise", "train", write_run(tmp_path, steps=3000), "--out",
        out, launcher=("-m", "torch.distributed.run"),
    )  # fmt: skip
    wait_for_steps(process, out, 3)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 1
    done = metrics(out)[-1]["step"]
    assert f"stopped after step {done} of 3000" in output
    assert f"step-{done:08d}" in checkpoints(out)


def test_no_worker_survives_its_launcher(tmp_path):
    out = tmp_path / "run"
    process = start("train", write_run(tmp_path, steps=100_000), "--nproc", "2", "--out", out)
    wait_for_steps(process, out, 2)
    workers = children(process)
    assert len(workers) == 2
    process.kill()
    process.communicate(timeout=SECONDS)  # ends when the last worker closes the pipe
    deadline = time.monotonic() + SECONDS
    while not all(state(worker) in ("Z", None) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_damaged_checkpoints_are_never_silently_trained_over(straight, tmp_path):
    """The newest damaged: continue from the one before it, and say so. All damaged: refuse."""
    out = shutil.copytree(straight, tmp_path / "run")
    run = write_run(tmp_path)
    for name in ("step-00000012", "step-00000008", "step-00000004"):
        shard = out / "checkpoints" / name / "__0_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        if name == "step-00000012":
            code, output = shardwise("train", run, "--nproc", "2", "--out", out)
            assert code == 0, output
            assert "step-00000012 is skipped: __0_0.distcp is damaged" in output
            assert "continuing after step 8" in output
            assert trajectory(out) == trajectory(straight)
            shutil.rmtree(out / "checkpoints" / "step-00000012")
    code, output = shardwise("train", run, "--nproc", "2", "--out", out)
    assert code == 2
    assert "every checkpoint is damaged" in output
