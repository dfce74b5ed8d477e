"""`shardwise calibrate` on two CPU ranks, with a grid so small that it takes seconds."""

from __future__ import annotations

import json
import sys

import pytest

from shardwise.cli.main import main
from shardwise.spec import load_run
from shardwise.verbs import calibrate

SMALL = """
import sys
from shardwise.verbs.calibrate_rank import main
def shrink():
    from shardwise.profiling.calibration import attention, links, memory_bound, products
    products.shapes = lambda device, quick: [(64, 64), (128, 64), (512, 64)]
    products._CPU_ROWS, attention._CPU_LENGTHS = (16, 64), (16, 32, 64)
    memory_bound._CPU_SIZES, links._CPU_SIZES = (2**10, 2**12), (2**12, 2**14, 2**16)
from shardwise.profiling.calibration import measure
kept = measure.measure
measure.measure = lambda *given, **options: (shrink(), kept(*given, **options))[1]
sys.exit(main())
"""


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(calibrate, "WORKER", (sys.executable, "-c", SMALL))


def test_two_ranks_give_a_cluster_file_that_plan_takes(small, capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    assert main(["calibrate", "--nproc", "2", "-o", str(file), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    run = load_run({"model": "tiny-llama", "cluster": str(file), "recipe": {"sequence": 64}})
    found = run.cluster.gpu.calibration
    assert printed == run.cluster.dump()
    assert (run.cluster.gpus, found.ranks, run.cluster.gpu.name) == (2, 2, "cpu")
    assert found.command == "shardwise calibrate --nproc 2"
    link = run.cluster.gpu.intra
    assert link.class_ == "measured" and link.name == "gloo-2"
    assert all((link.reduce_curve, link.scatter_curve, link.exchange_curve, link.hop_curve, found.overlap))
    assert run.cluster.gpu.peak_tflops["fp32"].value == max(max(row.forward) for row in found.products)

    words = ["plan", "tiny-llama", "--cluster", str(file), "--seq", "64", "--precision", "fp32", "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    times = answer["candidates"][0]["time"]
    assert (times["compute_class"], times["communication_class"]) == ("calibrated", "measured")
    assert any("communication within cpu is measured" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrate", "--nproc", "0"], "--nproc 0"),
        (["calibrate", "-o", "no/such/directory/x.yaml"], "is no directory"),
        (["plan", "tiny-llama", "--seq", "64"], "--gpu CHIP or --cluster FILE"),
        (["plan", "tiny-llama", "--seq", "64", "--gpu", "cpu"], "--gpus is needed"),
        (["plan", "tiny-llama", "--seq", "64", "--gpu", "cpu", "--cluster", "x.yaml"], "not both"),
        (["plan", "tiny-llama", "--seq", "64", "--cluster", "none.yaml"], "no such file"),
    ],
)
def test_mistakes(capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err
