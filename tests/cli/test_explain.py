"""`explain`, `whatif` and `compare`, in this process."""

import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.planner.single import judge
from shardwise.planner.stacks import STACKS
from shardwise.spec import load_run
from shardwise.spec.memory import GIB

PIPELINE = """\
model: llama3-8b
cluster: {gpu: h100-sxm, gpus: 16}
layout: {dp_shard: 2, tp: 2, pp: 4, zero: 2, schedule: interleaved, virtual_stages: 2, recompute: selective}
recipe: {sequence: 4096, batch_tokens: 131072, tokens: 1G}
"""
PLAIN = """\
model: llama3-8b
cluster: {gpu: h100-sxm, gpus: 8}
layout: {dp_shard: 8, recompute: selective}
recipe: {sequence: 4096, batch_tokens: 131072, tokens: 1G}
"""


def write(folder, text, name="run.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def run(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def explain_json(capsys, *words):
    code, out, err = run(capsys, "explain", *words, "--json")
    assert err == ""
    return code, json.loads(out)


def test_explain_says_everything_that_was_asked(capsys, tmp_path):
    code, out, _ = run(capsys, "explain", write(tmp_path, PIPELINE))
    assert code == 0
    for text in ("llama3-8b on 16 × h100-sxm", "verdict: fits", "binds: ", "parameters", "activations", "headroom",
                 "One step of rank", "compute ", "pipeline ", "idle ", "pp 4 → 2", "pp 4 → 8", "tp 2 → 4",
                 "micro_batch 1 → 2", "zero 2 → 0", "recompute selective → full", "schedule interleaved → zbv",
                 "loss full → chunked", "% step", "GiB", "modelled, not measured"):  # fmt: skip
        assert text in out, text


def test_json_agrees_with_itself_and_with_the_planner(capsys, tmp_path):
    path = write(tmp_path, PIPELINE)
    code, answer = explain_json(capsys, path)
    assert code == 0
    whole = load_run(path)
    found = judge(whole.model, whole.fixed_layout, whole.cluster, whole.recipe, STACKS["shardwise"])
    assert answer["time"]["step_seconds"] == pytest.approx(found.step.seconds)
    assert answer["timeline"]["seconds"] == pytest.approx(found.step.seconds, rel=0.01)
    assert answer["memory"]["live_gib"] == pytest.approx(found.memory.live / GIB)
    assert answer["rank"] == found.memory.rank
    assert answer["micro_batches"] == 16
    streams = answer["timeline"]["streams"]
    assert streams["tensor"]["exposed_seconds"] > 0
    by_change = {item["change"]: item for item in answer["neighbours"]}
    full = by_change["recompute selective → full"]
    assert full["step_change_percent"] > 0 > full["memory_change_gib"]
    assert full["layout"]["recompute"] == "full"


def test_a_neighbour_is_what_that_layout_itself_would_be(capsys, tmp_path):
    path = write(tmp_path, PLAIN)
    _, answer = explain_json(capsys, path)
    (change,) = [item for item in answer["neighbours"] if item["change"] == "tp 1 → 2 (dp_shard 8 → 4)"]
    _, other = explain_json(capsys, path, "--layout.tp", "2", "--layout.dp_shard", "4")
    assert 1 + change["step_change_percent"] / 100 == pytest.approx(
        other["time"]["step_seconds"] / answer["time"]["step_seconds"]
    )
    assert change["memory_change_gib"] == pytest.approx(other["memory"]["live_gib"] - answer["memory"]["live_gib"])


def test_what_cannot_run_is_named_with_its_reason(capsys, tmp_path):
    _, answer = explain_json(capsys, write(tmp_path, PLAIN), "--recipe.batch_tokens", "32768")
    refused = {item["change"]: item["reason"] for item in answer["neighbours"] if item["reason"]}
    assert "do not divide over 8 data ranks × micro_batch 2" in refused["micro_batch 1 → 2"]
    code, out, _ = run(capsys, "explain", tmp_path / "run.yaml", "--recipe.batch_tokens", "32768")
    assert code == 0
    assert "micro_batch 1 → 2: not possible: " in out


def test_explain_that_does_not_fit_exits_with_1_and_memory_binds(capsys, tmp_path):
    code, answer = explain_json(capsys, write(tmp_path, PLAIN), "--cluster.gpu", "l4", "--layout.micro_batch", "4")
    assert (code, answer["verdict"], answer["binds"]["what"]) == (1, "oom", "memory")


def test_the_rank_picks_memory_and_timeline(capsys, tmp_path):
    path = write(tmp_path, PIPELINE)
    _, last = explain_json(capsys, path, "--rank", "15")
    assert (last["rank"], last["rank_memory"]["stage"]) == (15, 3)
    assert last["rank_memory"]["parts_gib"]["logits"] > 0
    code, _, err = run(capsys, "explain", path, "--rank", "16")
    assert code == 2
    assert "ranks 0 to 15" in err


def test_files_are_written_whole(capsys, tmp_path):
    path = write(tmp_path, PIPELINE)
    trace, picture = tmp_path / "trace.json", tmp_path / "schedule.svg"
    code, _, _ = run(capsys, "explain", path, "-o", trace, "--picture", picture)
    assert code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    _, answer = explain_json(capsys, path)
    assert max(ends) / 1e6 == pytest.approx(answer["time"]["step_seconds"], rel=0.01)
    boxes = [item for item in ET.parse(picture).getroot().iter() if item.tag.endswith("title")]
    assert len(boxes) == 1 + 4 * 2 * 2 * 16  # ranks × stages × directions × micro-batches, and its own
    assert sorted(item.name for item in tmp_path.iterdir()) == ["run.yaml", "schedule.svg", "trace.json"]


def test_no_picture_without_a_pipeline_and_no_file_where_there_is_no_folder(capsys, tmp_path):
    path = write(tmp_path, PLAIN)
    code, _, err = run(capsys, "explain", path, "--picture", tmp_path / "x.svg")
    assert code == 2
    assert "layout.pp 1" in err
    code, out, err = run(capsys, "explain", path, "-o", tmp_path / "none" / "x.json")
    assert (code, out) == (2, "")
    assert "cannot be written" in err


def test_auto_is_the_planners_first_choice(capsys, tmp_path):
    text = PLAIN.replace("layout: {dp_shard: 8, recompute: selective}", "layout: auto")
    code, answer = explain_json(capsys, write(tmp_path, text))
    assert code == 0
    assert "layout: auto is the planner's first choice" in answer["notes"]
    _, out, _ = run(capsys, "plan", "llama3-8b", "--gpu", "h100-sxm", "--gpus", "8", "--seq", "4096", "--batch-tokens",
                    "131072", "--top", "1", "--json")  # fmt: skip
    first = json.loads(out)["candidates"][0]
    assert answer["layout"]["micro_batch"] == first["layout"]["micro_batch"]
    assert answer["time"]["step_seconds"] == pytest.approx(first["time"]["step_seconds"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout.tp", "2"], "makes 16 ranks, but cluster.gpus is 8"),
        (["--layout", "{tp: 3}"], "nearest: "),
        (["--cluster.gpu", "cpu"], "not known"),
        (["--layout.tpp", "3"], "unknown field 'tpp'"),
    ],
)
def test_wrong_input_exits_with_2(capsys, tmp_path, words, message):
    code, out, err = run(capsys, "explain", write(tmp_path, PLAIN), *words)
    assert (code, out) == (2, "")
    assert message in err


def test_whatif_fills_the_changed_cluster_and_says_so(capsys, tmp_path):
    path = write(tmp_path, PLAIN)
    code, out, _ = run(capsys, "whatif", path, "--cluster.gpus", "16", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["candidates"][1]["layout"]["dp_shard"] == 16
    assert "to fill 16 chips: dp_shard 8 → 16" in answer["notes"]
    gpus = answer["differences"]["gpus"]
    assert (gpus["values"], gpus["change_percent"]) == ([8.0, 16.0], 100.0)
    first, second = answer["differences"]["step_seconds"]["values"]
    assert 0.4 < second / first < 0.7
    assert answer["differences"]["usd"]["values"][0] > 0
    code, out, _ = run(capsys, "whatif", path, "--layout.tp", "2")
    assert code == 0
    for text in ("as it is", "changed", "step s", "tokens/s/GPU", "MFU", "memory live GiB", "verdict", "USD", "points"):
        assert text in out


def test_whatif_needs_a_change_and_keeps_what_was_given(capsys, tmp_path):
    path = write(tmp_path, PLAIN)
    code, _, err = run(capsys, "whatif", path)
    assert code == 2
    assert "nothing is changed" in err
    code, _, err = run(capsys, "whatif", path, "--layout.dp_shard", "4")
    assert code == 2
    assert "changed: layout: dp_shard 4" in err


def test_compare_names_the_files(capsys, tmp_path):
    first, second = write(tmp_path, PLAIN, "plain.yaml"), write(tmp_path, PIPELINE, "pipeline.yaml")
    code, out, _ = run(capsys, "compare", first, second)
    assert code == 0
    assert "plain: dp_shard 8" in out
    assert "bubble" in out
    code, out, _ = run(capsys, "compare", first, second, "--json")
    answer = json.loads(out)
    assert answer["columns"] == ["plain", "pipeline"]
    assert answer["differences"]["bubble_fraction"]["values"][0] == 0.0
    assert answer["differences"]["bubble_fraction"]["change_percent"] is None
    second.write_text(PIPELINE.replace("tp: 2", "tp: 16"))
    code, _, err = run(capsys, "compare", first, second)
    assert code == 2
    assert err.startswith("error: pipeline: ")


def test_no_torch(tmp_path):
    path = write(tmp_path, PIPELINE)
    for words in (["explain", str(path)], ["whatif", str(path), "--layout.micro_batch", "2"]):
        code = f"import sys; from shardwise.cli.main import main; main({words!r}); sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_manuals_commands_run(capsys, tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "explain.md").read_text()
    write(tmp_path, re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ shardwise (.*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert run(capsys, *shlex.split(command))[0] in (0, 1)
    assert (tmp_path / "trace.json").exists()
