"""`check`, in this process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent
GOOD = """\
model: llama3-8b
cluster: {gpu: h100-sxm, gpus: 8}
layout: {dp_shard: 8, recompute: selective}
recipe: {sequence: 8192, batch_tokens: 1048576, tokens: 100G, evaluation: {every: 200}, checkpoint: {every: 100}}
"""


def run(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


def findings(capsys, *words):
    code, out, err = run(capsys, "check", *words, "--json")
    assert err == ""
    answer = json.loads(out)
    assert answer["ok"] == (code == 0) == all(item["level"] == "warning" for item in answer["findings"])
    return code, answer


def test_nothing_is_wrong(capsys, good):
    code, out, _ = run(capsys, "check", good)
    assert code == 0
    assert "error" not in out
    assert "modelled, not measured" in out
    assert out.endswith("ok\n")


def test_illegal_names_every_reason(capsys, good):
    code, answer = findings(capsys, good, "--layout.tp", "3", "--layout.dp_shard", "2")
    assert (code, answer["verdict"], answer["candidate"]) == (1, None, None)
    texts = [item["text"] for item in answer["findings"]]
    assert any("makes 6 ranks, but cluster.gpus is 8" in text for text in texts)
    assert any("neither divides model.kv_heads 8 nor is a multiple of it; nearest: " in text for text in texts)
    assert {item["level"] for item in answer["findings"]} == {"error"}


def test_a_batch_that_does_not_divide(capsys, good):
    code, out, _ = run(capsys, "check", good, "--recipe.batch_tokens", "73728")
    assert code == 1
    assert "do not divide over 8 data ranks × micro_batch 1; nearest: batch_tokens 65536" in out
    assert out.endswith("not ok\n")


def test_what_does_not_fit_says_how_much_and_what_would(capsys, good):
    code, answer = findings(capsys, good, "--layout.recompute", "none", "--layout.micro_batch", "2")
    assert (code, answer["verdict"]) == (1, "oom")
    (memory,) = [item for item in answer["findings"] if item["topic"] == "memory"]
    low = answer["candidate"]["memory"]["used_gib"][0]
    assert f"at least {low:.1f} GiB of 79.0" in memory["text"]
    assert "the fastest neighbour that fits: " in memory["text"]


def test_warnings_alone_exit_with_0_and_costly_advice_with_1(capsys, good):
    code, answer = findings(capsys, good, "--recipe.evaluation.tokens", "0")
    assert (code, [item["level"] for item in answer["findings"]]) == (0, ["warning"])
    code, answer = findings(capsys, good, "--layout.tp", "8", "--layout.dp_shard", "1")
    first = answer["findings"][0]
    assert (code, first["level"], first["topic"]) == (1, "error", "tensor parallelism")
    assert first["saves_percent"] > 5


def test_a_chip_without_figures_is_checked_for_legality_alone(capsys):
    path = ROOT / "examples" / "tiny.yaml"
    code, out, _ = run(capsys, "check", path, "--recipe.precision", "fp64")
    assert code == 0
    assert "cpu: its peak rate for fp64 is not known; known: fp32: legality alone was checked" in out
    code, out, _ = run(capsys, "check", path, "--recipe.precision", "fp64", "--cluster.gpus", "3")
    assert code == 1
    assert "nearest: 2 ranks" in out


def test_unknown_memory_is_said_and_not_guessed(capsys):
    code, answer = findings(capsys, ROOT / "examples" / "tiny.yaml", "--layout", "{dp_shard: 2, micro_batch: 16}")
    assert (code, answer["verdict"]) == (0, "unknown")
    memory = next(item for item in answer["findings"] if item["topic"] == "memory")
    assert memory["level"] == "warning"
    assert "how much cpu has is not known" in memory["text"]


def test_auto_is_the_planners_first_choice(capsys, good):
    code, out, _ = run(capsys, "check", good, "--layout", "auto")
    assert code in (0, 1)
    assert "layout: auto is the planner's first choice" in out
    code, out, _ = run(capsys, "check", good, "--layout", "auto", "--recipe.sequence", "8191", "--recipe.batch_tokens",
                       "8191", "--cluster.gpus", "1024")  # fmt: skip
    assert code == 1
    assert "error: legality: no layout of llama3-8b" in out


def test_what_train_cannot_do_yet_is_a_note(capsys):
    answer = shardwise.check({"model": "gpt-oss-20b", "cluster": {"gpu": "h100-sxm", "gpus": 64},
                              "layout": {"dp_shard": 64, "ep": 8}, "recipe": {"sequence": 4096}})  # fmt: skip
    assert any(note.startswith("train: model.attention_sinks") for note in answer.notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout.tpp", "3"], "unknown field 'tpp'"),
        (["--layout.tp", "0"], "layout.tp"),
        (["--model", "tiny-lama"], "did you mean 'tiny-llama'"),
    ],
)
def test_wrong_input_exits_with_2(capsys, good, words, message):
    code, out, err = run(capsys, "check", good, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_missing_file_exits_with_2(capsys, tmp_path):
    code, _, err = run(capsys, "check", tmp_path / "none.yaml")
    assert code == 2
    assert "no such file" in err


def test_no_torch(good):
    words = ["check", str(good)]
    code = f"import sys; from shardwise.cli.main import main; main({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
