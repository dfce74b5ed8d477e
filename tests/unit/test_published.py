"""The benchmark on published runs: rows to Subjects, measured times, scores. Rows here are made up."""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.planner.stacks import STACKS
from shardwise.spec import InputError

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import fit_stacks, published
from benchmarks.published_nouns import Unusable
from benchmarks.published_rows import subject_of
from benchmarks.published_schema import read_rows
from benchmarks.published_scores import kendall_tau, macro_average, percentile, score_rows
from benchmarks.published_time import measured_seconds

PUBLISHED = Path(__file__).parents[3] / "shared/data/published_runs.jsonl"


def made_up(id: str = "lab-a", **changes: Any) -> dict[str, Any]:
    """A complete row; `changes` are {"part.key": value} with __ for the dot."""
    row: dict[str, Any] = {
        "id": id, "set": "throughput", "gold": True, "quality": "A", "source": {"kind": "made up"},
        "model": {"name": "gpt", "layers": 16, "hidden": 2048, "ffn": 8192, "heads": 16, "kv_heads": 16,
                  "head_dim": 128, "vocab": 51200, "seq": 2048, "params": None, "experts": None,
                  "topk": None, "moe_ffn": None, "shared_expert_ffn": None, "dense_layers": None, "mla": None,
                  "gated_mlp": False, "tied": True, "other": None},
        "hardware": {"gpu": "H100-SXM-80GB", "gpus": 16, "gpus_per_node": 8, "inter_bw": None},
        "layout": {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "vpp": None, "sp": False, "zero_stage": 1, "fsdp": None,
                   "micro_batch": 2, "global_batch": 256, "recompute": "none", "precision": "bf16",
                   "compile": None, "schedule": None,
                   "framework": "Megatron-LM", "overlap": None, "other": None},
        "measured": {"step_time_s": 1.0, "tokens_per_s_per_gpu": None, "samples_per_s": None, "tflops_per_gpu": None,
                     "mfu": None, "memory_gb": None, "memory_what": None, "oom": None},
        "mfu_notes": None, "notes": None, "derived": {},
    }  # fmt: skip
    for name, value in changes.items():
        part, key = name.split("__")
        row[part][key] = value
    return row


def report_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return score_rows(rows).report()


def test_a_row_becomes_a_subject():
    row = made_up(layout__tp=2, layout__pp=2, layout__vpp=4, layout__sp=None, layout__recompute="full")
    subject = subject_of(row)
    assert (subject.layout.dp_shard, subject.layout.tp, subject.layout.pp) == (4, 2, 2)
    assert (subject.layout.schedule, subject.layout.virtual_stages) == ("interleaved", 4)
    assert subject.micro_batches == 256 // (4 * 2)
    assert subject.sequence_parallel and subject.recompute.gemm == 1


def test_hybrid_sharding_replicates_over_nodes():
    row = made_up(layout__framework="PyTorch FSDP1", layout__zero_stage=3, layout__fsdp="FSDP1 HYBRID_SHARD")
    layout = subject_of(row).layout
    assert (layout.dp_shard, layout.dp_replicate) == (8, 2)


def test_the_stated_network_counts():
    usual, stated = made_up(), made_up(hardware__inter_bw="800 Gbps per node")
    fast, slow = (subject_of(row).cluster.gpu.inter for row in (usual, stated))
    assert fast is not None and slow is not None
    assert slow.bytes_per_second(1e9) == pytest.approx(fast.bytes_per_second(1e9) / 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model__layers": None}, "layers not stated"),
        ({"hardware__gpus": None}, "number of GPUs not stated"),
        ({"hardware__gpu": "TPU v4"}, "hardware TPU v4"),
        ({"layout__framework": "MaxText (JAX/XLA)"}, "framework MaxText"),
        ({"layout__tp": 3}, "degrees do not multiply"),
        ({"layout__global_batch": 24}, "the batch does not divide"),
        ({"layout__precision": "fp8", "hardware__gpu": "A100-SXM-80GB"}, "fp8 is not known"),
    ],
)
def test_what_cannot_be_expressed_says_why(change: dict[str, Any], reason: str):
    with pytest.raises(Unusable, match=reason):
        subject_of(made_up(**change))


def test_no_measurement_enters_the_prediction():
    row, other = made_up(), made_up(measured__step_time_s=123.0, measured__tokens_per_s_per_gpu=7.0, measured__mfu=0.9)
    assert score_rows([row]).timed[0].step == score_rows([other]).timed[0].step


def test_measured_seconds_from_throughput_and_flops():
    tokens = 256 * 2048
    row = made_up(measured__step_time_s=None, measured__tokens_per_s_per_gpu=tokens / 16 / 2)
    subject = subject_of(row)
    assert measured_seconds(row, subject) == pytest.approx(2.0)

    row = made_up(measured__step_time_s=None, measured__tflops_per_gpu=100.0)
    with pytest.raises(Unusable, match="how attention is counted"):
        measured_seconds(row, subject)
    matrices = 16 * (4 * 2048**2 + 2 * 2048 * 8192) + 51200 * 2048
    full = 6 * matrices + 12 * 16 * 2048 * 2048
    row["mfu_notes"] = "attention counted full"
    assert measured_seconds(row, subject) == pytest.approx(tokens * full / (100e12 * 16))
    row["mfu_notes"] = "causal-half"
    half = full - 6 * 16 * 2048 * 2047  # of S positions a token sees (S + 1) / 2
    assert measured_seconds(row, subject) == pytest.approx(tokens * half / (100e12 * 16))


def test_hardware_flops_are_converted_with_the_recomputed_forward():
    row = made_up(measured__step_time_s=None, measured__tflops_per_gpu=100.0, layout__recompute="full")
    row["mfu_notes"] = "full attention"
    model_flops = measured_seconds(row, subject_of(row))
    row["mfu_notes"] = "full attention, includes the recompute forward"
    assert measured_seconds(row, subject_of(row)) == pytest.approx(model_flops * 4 / 3)


def test_overall_is_a_mean_over_sources_with_enough_rows():
    many = {"big": [0.1] * 10, "small": [0.3] * 5, "tiny": [0.9] * 4}
    assert macro_average(many) == pytest.approx(
        {"n": 15, "median_abs_pct": 20.0, "p90_abs_pct": 20.0, "bias_pct": 20.0}
    )
    assert macro_average({"tiny": [0.9]})["median_abs_pct"] is None


def test_percentile_and_kendall():
    assert percentile([4, 1, 3, 2, 5], 0.9) == pytest.approx(4.6)
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))


def test_a_sweep_differs_in_layout_only():
    fast, slow = {"layout__tp": 1}, {"layout__tp": 8}
    rows = [made_up("lab-1", **fast), made_up("lab-2", **slow), made_up("lab-3", layout__tp=2)]
    rows[1]["measured"]["step_time_s"] = 0.5  # measured fastest where slowest is predicted
    sweeps = score_rows(rows).sweeps
    assert [(sweep.source, sweep.rows) for sweep in sweeps] == [("lab", 3)]
    assert sweeps[0].regret == pytest.approx(1.0)
    rows[2]["layout"]["global_batch"] = 512
    assert score_rows(rows).sweeps == []


def test_report_has_the_schema_and_says_what_is_left_out():
    rows = [made_up(f"lab-{number}", layout__micro_batch=2**number) for number in range(5)]
    rows += [made_up(f"other-{number}") for number in range(5)]
    listed = made_up("lab-c")
    listed["quality"] = "C"
    rows += [listed, made_up("lab-x", layout__framework="MaxText")]
    report = report_of(rows)
    assert set(report) >= {"overall", "by_source", "baselines", "unusable"}
    assert set(report["overall"]) == {"time", "memory_allocated", "memory_reserved", "oom", "regret"}
    assert report["overall"]["time"]["n"] == 10
    assert report["overall"]["memory_reserved"] == {
        "n": 0, "median_abs_pct": None, "p90_abs_pct": None, "bias_pct": None
    }  # fmt: skip
    assert set(report["overall"]["oom"]) == {"n", "false_fits", "measured", "false_ooms"}
    assert set(report["overall"]["regret"]) == {"sweeps", "median_pct", "max_pct", "kendall_tau"}
    assert report["unusable"] == {"not scored: quality C": 1, "time: framework MaxText": 1}
    assert set(report["baselines"]) == {"constant_mfu", "nearest_row"}
    assert report["baselines"]["nearest_row"]["by_source"]["other"]["n"] == 5
    json.dumps(report, allow_nan=False)


def test_constant_mfu_is_40_percent_of_the_peak():
    item = score_rows([made_up()]).timed[0]
    matrices = 16 * (4 * 2048**2 + 2 * 2048 * 8192) + 51200 * 2048
    flops = 256 * 2048 * (6 * matrices + 12 * 16 * 2048 * 2048)
    assert item.constant == pytest.approx(flops / (0.4 * 989.4e12 * 16))


def test_memory_ci_rows_are_scored_for_memory_only():
    row = made_up(measured__memory_gb=20.0, measured__memory_what="torch peak allocated bytes")
    row["set"] = "memory-ci"
    scores = score_rows([row])
    assert not scores.timed
    assert [(item.quantity, item.id) for item in scores.memory] == [("allocated", "lab-a")]


def test_an_oom_row_that_fits_is_a_false_fit():
    small = made_up("lab-small", measured__oom=True, measured__step_time_s=None)
    big = copy.deepcopy(small)
    big["id"], big["model"]["layers"] = "lab-big", 400
    assert report_of([small, big])["overall"]["oom"] == {"n": 2, "false_fits": 1, "measured": 0, "false_ooms": 0}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    file, page = tmp_path / "runs.jsonl", tmp_path / "accuracy.md"
    file.write_text("\n".join(json.dumps(made_up(f"lab-{number}")) for number in range(5)))
    monkeypatch.setattr(sys, "argv", ["published", str(file), "--json", "--page", str(page)])
    assert published.main() == 0
    assert json.loads(capsys.readouterr().out)["overall"]["time"]["n"] == 5
    assert "Held-out sources" in page.read_text() and "| lab | 5 |" in page.read_text()
    assert list(tmp_path.iterdir()) != [] and not list(tmp_path.glob(".*"))


def test_a_field_of_the_wrong_kind_is_a_reason_not_a_traceback():
    rows = [made_up("lab-1", layout__framework=7), made_up("lab-2", layout__pp=1.5), made_up("lab-3", hardware__gpus=0)]
    reasons = report_of(rows)["unusable"]
    assert [key.partition(", expected")[0] for key in reasons] == [
        "not scored: hardware.gpus is 0",
        "not scored: layout.framework is 7",
        "not scored: layout.pp is 1.5",
    ]


def test_bad_files_are_named(tmp_path: Path):
    with pytest.raises(InputError, match="missing.jsonl"):
        read_rows(tmp_path / "missing.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a-b"}\n')
    with pytest.raises(InputError, match="line 1: no 'model'"):
        read_rows(bad)


def test_the_fit_reads_calibration_sources_only_and_lowers_its_loss():
    names = fit_stacks.FAMILIES["megatron"]
    rows = [made_up(f"dgxc-{batch}", layout__micro_batch=batch) for batch in (1, 2, 4)] + [made_up("sc21-a")]
    cases = fit_stacks.calibration_cases(rows)
    assert [case.row["id"] for case in cases] == ["dgxc-1", "dgxc-2", "dgxc-4"]
    fit = fit_stacks.Fit(cases, dict(STACKS))
    before = fit.loss(fit.errors)
    free = [constant for constant in fit_stacks.constants(names, cases) if constant.key == ("hopper", "bf16")]
    assert free and fit.improve(free[0], 0.1)
    assert fit.loss(fit.errors) < before
    assert fit.stacks["megatron"].gemm == fit.stacks["deepspeed"].gemm


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published runs are not beside this checkout")
def test_targets_on_the_published_runs():
    report = report_of(read_rows(PUBLISHED))
    overall = report["overall"]
    assert overall["time"]["median_abs_pct"] <= 10 and overall["time"]["p90_abs_pct"] <= 25
    assert overall["memory_allocated"]["median_abs_pct"] <= 6 and overall["memory_reserved"]["median_abs_pct"] <= 15
    assert overall["oom"]["false_fits"] == 0
    assert overall["oom"]["false_ooms"] <= 0.1 * overall["oom"]["measured"]
    assert overall["regret"]["median_pct"] <= 5
