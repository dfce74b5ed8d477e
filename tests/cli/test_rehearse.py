"""`shardwise rehearse`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main

RUN = """
model: {preset: tiny-llama}
cluster: {gpu: h100-sxm, gpus: 8}
layout: {dp_shard: 2, tp: 2, pp: 2}
recipe: {sequence: 128, batch_tokens: 1024}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def test_json_pictures_and_journal(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["rehearse", str(run), "--rank", "5", "-o", str(out), "--out", str(out), "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rank"] == 5 and answer["mesh"] == "pp 1, dp_shard 0, tp 1" and answer["verdict"] == "fits"
    memory, planned = answer["memory"], answer["predicted"]
    assert memory["live_gib"] == pytest.approx(sum(memory["parts_gib"].values()))
    assert memory["live_gib"] <= memory["reserved_gib"] <= 2 * memory["live_gib"]
    assert planned["difference_gib"]["live"] == pytest.approx(planned["live_gib"] - memory["live_gib"])
    assert answer["exact"] and answer["modelled"] and answer["time"]["compute_seconds"] is None
    assert all(Path(path).stat().st_size > 1000 for path in answer["files"]) and len(answer["files"]) == 2
    (line,) = (out / "predictions.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["verb"] == "rehearse" and record["run"]["layout"]["pp"] == 2
    assert record["memory"] == memory


def test_several_ranks_as_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(run), "--rank", "all-distinct", "--layout.compile", "true"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[1] for line in text.splitlines() if line.startswith("rank ")] == ["0", "4", "7"]
    assert "modelled: layout.compile: saved as by Inductor of torch" in text and "verdict: fits" in text


def test_what_does_not_fit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama3-8b", "--model.layers", "2", "--cluster.gpus", "1", "--layout", "{micro_batch: 64}"]
    words += ["--recipe", "{sequence: 8192, batch_tokens: 524288}"]
    assert main(["rehearse", str(run), *words]) == 1
    assert "verdict: oom" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "8"], "--rank 8: the layout has ranks 0 to 7; nearest: 7"),
        (["--rank", "fulest"], "fullest"),
        (["--device", "gpu"], "--device"),
        (["--steps", "1"], "--steps 1: at least 2"),
        (["--imbalance", "0.5"], "--imbalance 0.5"),
        (["--recipe.precision", "fp8"], "cannot be trained by this version"),
        (["--layout.tp", "4"], "makes 16 ranks, but cluster.gpus is 8"),
    ],
    ids=str,
)
def test_mistakes(run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["rehearse", str(run), "--device", "cuda"]) == 2
    assert "--device cpu needs none" in capsys.readouterr().err
