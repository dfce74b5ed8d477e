"""`shardwise profile`: bottlenecks that are planted on CPU ranks, traces of others, and what is written."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

import shardwise.verbs.profile as verb
from jobs import RUN
from shardwise.cli.main import main
from shardwise.report.profile_text import profile_lines
from shardwise.spec import InputError, Run
from traces import TraceBuilder

DATA = Path(__file__).parent.parent / "data" / "traces"
ONE = {"dp_shard": 1, "zero": 0, "micro_batch": 1}

# What the worker does before it is one: {action} is Python.
WORKER = "import sys\n{action}\nfrom shardwise.verbs.profile_rank import main\nsys.exit(main())"
SLOW_READER = """
import time
from shardwise.training.batches import Batches
read = Batches._read
def slow(self, index):
    time.sleep(0.4)
    return read(self, index)
Batches._read = slow
"""
SAVES_EVERY_STEP = """
import time
from torch.profiler import record_function
from shardwise.training.loop import Trainer
steps = Trainer.steps
def saving(self, *arguments):
    for step in steps(self, *arguments):
        yield step
        with record_function("dcp.save"):
            time.sleep(0.4)
Trainer.steps = saving
"""

RECOMPILES_EVERY_STEP = """
import torch
from shardwise.training.loop import Trainer
update = Trainer._update
@torch.compile(backend="eager", dynamic=False)
def twice(x):
    return 2 * x
sizes = iter(range(2, 100))
def recompiling(self, norm, rate):
    twice(torch.ones(next(sizes)))
    update(self, norm, rate)
Trainer._update = recompiling
"""

# Each one is waited for before the real one starts.
GATHERS_AGAIN = """
import torch.distributed as dist
def again(real):
    def gather(*arguments, **options):
        for _ in range(20):
            real(*arguments, **{**options, "async_op": False})
        return real(*arguments, **options)
    return gather
for name in ("all_gather_into_tensor", "all_gather_single"):
    if hasattr(dist, name):
        setattr(dist, name, again(getattr(dist, name)))
"""


def run_main(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def profile(tmp_path, monkeypatch=None, action="", nproc=2, model=None, layout=None, **recipe):
    if monkeypatch:
        monkeypatch.setattr(verb, "WORKER", (sys.executable, "-c", WORKER.replace("{action}", action)))
    data = {
        **RUN,
        "model": {**RUN["model"], **(model or {})},
        "layout": layout or {"dp_shard": nproc},
        "recipe": {**RUN["recipe"], **recipe},
    }
    said = []
    answer = verb.profile(Run.load(data), out=tmp_path / "out", steps=2, nproc=nproc, say=said.append)
    assert "2 steps to warm up, 2 timed, 2 traced" in said[0]
    return answer


def test_a_slow_reader_is_the_bottleneck(tmp_path, monkeypatch):
    answer = profile(tmp_path, monkeypatch, SLOW_READER)
    assert answer.diagnosis.bottleneck == "input"
    assert answer.diagnosis.share > 0.5
    assert answer.measured.input_fraction > 0.5
    assert len(answer.ranks) == 2
    assert all(len(rank.steps) == 2 for rank in answer.ranks)


def test_a_checkpoint_at_every_step_is_the_bottleneck(tmp_path, monkeypatch):
    answer = profile(tmp_path, monkeypatch, SAVES_EVERY_STEP, nproc=1, layout=ONE)
    assert answer.diagnosis.bottleneck == "checkpoint"
    assert answer.diagnosis.remedies[0].change == "recipe.checkpoint.asynchronous: true"


def test_forced_recompilations_are_the_bottleneck_and_say_why(tmp_path, monkeypatch):
    answer = profile(tmp_path, monkeypatch, RECOMPILES_EVERY_STEP, nproc=1, layout=ONE)
    assert answer.diagnosis.bottleneck == "recompilation"
    assert answer.mean.compilations == 2  # in the two steps
    assert any("size mismatch" in item.reason for item in answer.recompilations)
    assert any("twice" in line and "size mismatch" in line for line in answer.diagnosis.evidence)


def test_a_tiny_batch_is_bound_by_the_host(tmp_path):
    answer = profile(tmp_path, nproc=1, layout=ONE, sequence=8, batch_tokens=8)
    assert answer.diagnosis.bottleneck == "host-bound"
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    (record,) = map(json.loads, lines)
    assert record["verb"] == "profile"
    assert record["predicted"]["step_seconds"] == answer.predicted_seconds
    assert record["measured"]["step_seconds"] == answer.measured.step_seconds
    assert record["predicted"]["parts_seconds"].keys() == record["measured"]["traced_parts_seconds"].keys()
    assert Run.load(record["run"]) == answer.run
    assert "without the profiler" in "\n".join(profile_lines(answer))


def test_gathers_that_nothing_hides(tmp_path, monkeypatch):
    answer = profile(tmp_path, monkeypatch, GATHERS_AGAIN, model={"hidden": 256, "ffn": 512, "head_dim": 64})
    assert answer.diagnosis.bottleneck == "exposed all_gather"
    modelled = [item for item in answer.diagnosis.remedies if item.class_ == "modelled"]
    assert modelled
    assert all(item.gain_percent > 0 and item.layout is not None for item in modelled)
    assert answer.comparison["exposed data"][0] > 0


def test_a_rank_that_fails_is_said(tmp_path, monkeypatch, capfd):
    with pytest.raises(verb.Unfinished) as failure:
        profile(tmp_path, monkeypatch, "raise SystemExit(3)", nproc=1, layout=ONE)
    assert failure.value.code == 3
    assert not (tmp_path / "out" / "predictions.jsonl").exists()


def test_a_real_trace_on_the_command_line(capsys, tmp_path):
    trace, page, tracks = DATA / "nccl_rank0_two_steps.json.gz", tmp_path / "p.html", tmp_path / "t.json"
    code, out, _ = run_main(capsys, "profile", "--trace", trace, "--html", page, "--chrome", tracks)
    assert code == 0
    assert out.startswith("bottleneck: host-bound, 7")
    assert "all_reduce, group 0" in out
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    names = {event["args"]["name"] for event in json.loads(tracks.read_text())["traceEvents"] if event["ph"] == "M"
             and event["name"] == "process_name"}  # fmt: skip
    assert names == {"rank 0, measured"}


def test_traces_beside_their_run(capsys, tmp_path):
    """Many files after one --trace; the Run's prediction stands beside them."""
    paths = []
    for rank in range(2):
        builder = TraceBuilder(rank)
        for start in (0, 100):
            builder.step(start, start + 100)
            builder.kernel(start, start + 50)
            builder.collective(start + 50, start + 100, "all_gather", "1", "mesh_shard", launched=start)
        paths.append(builder.write(tmp_path / f"rank{rank}.json.gz"))
    run = tmp_path / "run.yaml"
    recipe = {"sequence": 2048, "batch_tokens": 16384}
    cluster = {"gpu": "h100-sxm", "gpus": 2}
    run.write_text(yaml.safe_dump({"model": "llama3.2-1b", "cluster": cluster, "recipe": recipe}))
    tracks = tmp_path / "t.json"
    words = ("--layout.dp_shard", "2", "--layout.micro_batch", "1", "--chrome", tracks, "--json")
    code, out, err = run_main(capsys, "profile", run, "--trace", *paths, *words)
    assert code == 0, err
    answer = json.loads(out)
    assert answer["diagnosis"]["bottleneck"] == "exposed all_gather"
    modelled = [item for item in answer["diagnosis"]["remedies"] if item["class"] == "modelled"]
    assert modelled and modelled[0]["gain_percent"] > 0
    assert answer["comparison"]["exposed data"]["measured_seconds"] == pytest.approx(0.05)
    assert answer["predicted_step_seconds"] > 0
    labels = [event["args"]["name"] for event in json.loads(tracks.read_text())["traceEvents"]
              if event["name"] == "process_name"]  # fmt: skip
    assert labels == ["rank 0, predicted", "rank 0, measured", "rank 1, measured"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a Run to profile, or traces"),
        (["trace.json"], "traces are given with --trace"),
        (["--trace", "nowhere.json"], "no such file"),
        (["a.yaml", "b.yaml"], "one Run at a time"),
        (["--trace", "t.json", "--layout.tp", "2"], "--layout.tp is a field of a Run, and none is given"),
    ],
)
def test_mistakes(capsys, words, message):
    code, _, err = run_main(capsys, "profile", *words)
    assert code == 2
    assert message in err


def test_more_steps_than_a_trace_may_hold(tmp_path):
    with pytest.raises(InputError, match="--steps 51: 1 to 50"):
        verb.profile(Run.load(RUN), out=tmp_path, steps=51)
