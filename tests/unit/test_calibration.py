"""What `calibrate` measured: the noun, its interpolation, and the planner's use of it."""

from __future__ import annotations

import math

import pytest
import torch
import yaml

from shardwise.planner.collectives import Group, hop_seconds, ring_seconds
from shardwise.planner.compute import Speed
from shardwise.planner.rates import MeasuredSpeed, Rates, along
from shardwise.planner.single import judge
from shardwise.planner.stacks import STACKS, own_stack
from shardwise.planner.work import Gemm, Scores
from shardwise.profiling.calibration import attention, memory_bound, products
from shardwise.profiling.calibration.clock import Clock, Pool
from shardwise.spec import Cluster, InputError, Run, load_run
from shardwise.spec.calibration import Calibration
from shardwise.spec.cluster import Link
from shardwise.spec.presets import gpu_preset
from shardwise.verbs.calibrate import cluster_yaml
from shardwise.verbs.plan import plan

OPS = ("rmsnorm", "residual", "heads", "rotated_heads", "swiglu", "loss", "embedding", "copy", "accumulate", "clip",
       "adamw", "cast", "routing", "reduce_input", "gelu", "layernorm", "bias", "chunked_loss")  # fmt: skip


def fields(**changes):
    """Products at 100, 80 and 60 TFLOP/s, attention at 50 and 40, other ops at 1 and 2 µs per million elements."""
    product = {"dtype": "bf16", "n": 4096, "k": 4096, "rows": [1024, 4096], "forward": [50, 100],
               "input_gradient": [40, 80], "weight_gradient": [30, 60]}  # fmt: skip
    wide = {**product, "n": 16384, "forward": [100, 200]}
    scores = {"dtype": "bf16", "backend": "cudnn", "head_dim": 128, "value_dim": 128, "lengths": [1024, 8192],
              "forward": [50, 50], "backward": [40, 40]}  # fmt: skip
    ops = [{"op": op, "dtype": "bf16", "elements": [10**6, 10**9], "forward_us": [1, 1000], "backward_us": [2, 2000]}
           for op in OPS]  # fmt: skip
    return {"command": "test", "date": "2026-11-29", "device": "a chip", "torch": "2.13.0", "products": [product, wide],
            "attention": [scores], "memory_bound": ops, **changes}  # fmt: skip


def calibrated(**changes) -> Cluster:
    gpu = gpu_preset("h200-sxm").model_copy(update={"calibration": Calibration.load(fields(**changes))})
    return Cluster.load({"gpu": gpu, "gpus": 1})


def run_on(cluster, **layout) -> Run:
    recipe = {"sequence": 4096, "batch_tokens": 4096 * 2}
    return Run.load({"model": {"preset": "llama3-8b", "layers": 2}, "cluster": cluster, "recipe": recipe,
                     "layout": {"zero": 0, **layout}})  # fmt: skip


def step_of(run: Run):
    return judge(run.model, run.fixed_layout, run.cluster, run.recipe, own_stack(run.cluster.gpu)).step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"product": []}, "did you mean 'products'"),
        ({"attention": [{"dtype": "bf16", "backend": "cudn", "head_dim": 8, "value_dim": 8, "lengths": [1],
                         "forward": [1], "backward": [1]}]}, "did you mean 'cudnn'"),
        ({"memory_bound": [{"op": "copy", "dtype": "bf16", "elements": [1, 2], "forward_us": [1]}]},
         "forward_us has 1 values for 2 elements"),
        ({"products": [{"dtype": "bf16", "n": 8, "k": 8, "rows": [2, 1], "forward": [1, 1], "input_gradient": [1, 1],
                        "weight_gradient": [1, 1]}]}, "rows must ascend"),
    ],
)  # fmt: skip
def test_a_calibration_is_strict(changes, message):
    with pytest.raises(InputError, match=message):
        Calibration.load(fields(**changes))


def test_values_are_exact_where_measured_and_log_log_between():
    sizes, values = (1.0, 100.0, 10000.0), (1.0, 4.0, 8.0)
    assert [along(sizes, values, size, below=1, above=0) for size in sizes] == list(values)
    assert along(sizes, values, 10.0, below=1, above=0) == pytest.approx(2.0)
    assert along(sizes, values, 0.5, below=1, above=0) == pytest.approx(0.5)
    assert along(sizes, values, 1e6, below=1, above=0) == 8.0
    assert along(sizes, values, 1e6, below=1, above=1) == pytest.approx(800.0)


def test_products_by_shape_and_pass():
    rates = Rates(Calibration.load(fields()), "bf16", "bf16")
    exact = Gemm(4096, 4096, 4096)
    for kind, rate in (("forward", 100), ("input_gradient", 80), ("weight_gradient", 60)):
        assert rates.product_seconds(exact, kind) == pytest.approx(exact.flops / (rate * 1e12))
    between = Gemm(4096, 8192, 4096)  # in the middle of both weights
    assert rates.product_seconds(between, "forward") == pytest.approx(between.flops / (math.sqrt(100 * 200) * 1e12))
    halves = Gemm(4096, 8192, 4096, parts=2)  # two products of 4096 columns
    assert rates.product_seconds(halves, "forward") == pytest.approx(halves.flops / 100e12)
    fewer = Gemm(2048, 4096, 4096)
    assert rates.product_seconds(fewer, "forward") == pytest.approx(fewer.flops / (math.sqrt(50 * 100) * 1e12))


def test_attention_takes_the_kernel_that_the_trainer_takes():
    slow = {**fields()["attention"][0], "backend": "flash", "forward": [1, 1], "backward": [1, 1]}
    rates = Rates(Calibration.load(fields(attention=[slow, fields()["attention"][0]])), "bf16", "bf16")
    scores = Scores(1e12, 4096, 128, 128, 4.0)
    assert rates.attention_seconds(scores, "forward") == pytest.approx(1 / 50)
    assert rates.attention_seconds(scores, "backward") == pytest.approx(2.5 / 40)


def test_the_planner_uses_what_was_measured_and_nothing_else():
    run = run_on(calibrated(), micro_batch=1)
    gpu = run.cluster.gpu
    assert isinstance(own_stack(gpu).speed(gpu, "bf16"), MeasuredSpeed)
    assert type(own_stack(gpu).speed(gpu, "fp8")) is Speed  # not measured
    assert type(STACKS["megatron"].speed(gpu, "bf16")) is Speed  # another software
    before = step_of(run)
    slower = [{**row, "forward": [rate / 2 for rate in row["forward"]]} for row in fields()["products"]]
    after = step_of(run_on(calibrated(products=slower)))
    model, tokens = run.model, 4096
    narrow = model.hidden * (model.heads + 2 * model.kv_heads) * model.head_dim
    rates = Rates(gpu.calibration, "bf16", "bf16")
    columns = [narrow // model.hidden, model.hidden, model.ffn, model.ffn]
    added = sum(rates.product_seconds(Gemm(tokens, n, model.hidden), "forward") for n in columns)
    added += rates.product_seconds(Gemm(tokens, model.hidden, model.ffn), "forward")
    head = rates.product_seconds(Gemm(tokens, model.vocabulary, model.hidden), "forward")
    assert after.seconds - before.seconds == pytest.approx(2 * (2 * added + head))  # micro-batches, layers


def test_the_host_is_a_floor_under_a_layer():
    layer = {"style": "llama", "forward_us": 1e6, "backward_us": 2e6, "update_us": 3e6}
    waits = step_of(run_on(calibrated(host={"layers": [layer], "step_us": 5e6})))
    device = step_of(run_on(calibrated())).seconds
    assert device < 1
    # Two micro-batches of two layers, and the update; the device's last piece of work comes after.
    assert waits.seconds == pytest.approx(2 * 2 * 3 + 2 * 3 + 5, abs=device)
    assert waits.parts["host"] == pytest.approx(waits.seconds - device)
    quick = {**layer, "forward_us": 1.0, "backward_us": 1.0, "update_us": 0.0}
    assert step_of(run_on(calibrated(host={"layers": [quick]}))).seconds == pytest.approx(device, rel=1e-3)
    # Where the host computes, its time beyond that of a whole eager layer is added.
    sharded = {**layer, "sharded": True, "backward_us": 2.5e6}
    serial = {"layers": [layer, sharded], "serial": True}
    assert step_of(run_on(calibrated(host=serial))).seconds == pytest.approx(device)
    more = step_of(run_on(calibrated(host=serial), zero=3)).seconds - step_of(run_on(calibrated(), zero=3)).seconds
    assert more == pytest.approx(2 * 2 * 0.5)


def test_recompute_and_compilation_change_a_measured_step():
    fused = [{"op": op, "dtype": "bf16", "compiled": True, "elements": [10**6, 10**9], "forward_us": [0.1, 100],
              "backward_us": [0.1, 100]} for op in ("rmsnorm", "rotated_heads", "swiglu")]  # fmt: skip
    cluster = calibrated(memory_bound=[*fields()["memory_bound"], *fused])
    eager, compiled = step_of(run_on(cluster)), step_of(run_on(cluster, compile=True))
    assert compiled.seconds < eager.seconds
    assert step_of(run_on(cluster, recompute="selective")).seconds > eager.seconds
    assert step_of(run_on(cluster, recompute="full")).seconds > step_of(run_on(cluster, recompute="selective")).seconds


def test_a_cluster_file_comes_back_and_a_run_takes_it(tmp_path):
    cluster, file = calibrated(), tmp_path / "mine.yaml"
    file.write_text(cluster_yaml(cluster))
    assert Cluster.load(yaml.safe_load(file.read_text())) == cluster
    given = {"model": "llama3-8b", "cluster": str(file), "recipe": {"sequence": 4096}}
    assert load_run(given).cluster == cluster
    assert load_run(given, [("cluster.gpus", "16")]).cluster.gpus == 16
    with pytest.raises(InputError, match=r"did you mean .*mine\.yaml"):
        load_run({**given, "cluster": str(tmp_path / "mime.yaml")})
    with pytest.raises(InputError, match="a file that `calibrate` wrote"):
        load_run({**given, "cluster": "h100-sxm"})
    file.write_text("gpus: 4\n")
    with pytest.raises(InputError, match="no Cluster file"):
        load_run(given)


def test_links_know_the_kinds_of_exchange():
    link = Link.load({"name": "x", "latency_us": 1, "class": "measured", "source": "test", "date": "2026-11-29",
                      "curve": [[1e6, 10]], "scatter_curve": [[1e6, 5]], "reduce_curve": [[1e6, 20]],
                      "hop_curve": [[1e6, 2]]})  # fmt: skip
    gpu = gpu_preset("h200-sxm").model_copy(update={"intra": link})
    group, payload = Group(2, 2), 1e8
    seconds = [ring_seconds(gpu, group, payload, kind) - 1e-6 for kind in ("gather", "reduce_scatter", "all_reduce")]
    assert seconds == pytest.approx([payload / 2 / 10e9, payload / 2 / 5e9, payload / 20e9])
    assert hop_seconds(gpu, payload, across=False) == pytest.approx(payload / 2e9 + 1e-6)


def test_plan_says_what_is_measured():
    cluster = calibrated()
    notes = plan(run_on(cluster)).notes
    assert any("compute is calibrated" in note for note in notes)
    assert any("communication is modelled" in note for note in notes)
    link = gpu_preset("h200-sxm").intra.model_copy(update={"class_": "measured"})
    found = Calibration.load(fields(ranks=2))
    gpu = cluster.gpu.model_copy(update={"intra": link, "calibration": found})
    answer = plan(run_on(Cluster.load({"gpu": gpu, "gpus": 1})))
    assert any("is measured" in note for note in answer.notes)
    assert answer.candidates[0].time.communication_class == "measured"
    assert plan(run_on({"gpu": "h200-sxm"})).candidates[0].time.compute_class == "modelled"


def test_what_measures_gives_rows_of_the_noun(monkeypatch):
    """Tiny sizes on this CPU: every op builds, runs and lands in its noun."""
    monkeypatch.setattr(products, "_CPU_ROWS", (8, 16))
    monkeypatch.setattr(products, "shapes", lambda device, quick: [(32, 16), (16, 32)])
    monkeypatch.setattr(attention, "_CPU_LENGTHS", (16, 32))
    monkeypatch.setattr(memory_bound, "_CPU_SIZES", (2**10, 2**12))
    device = torch.device("cpu")
    clock, pool = Clock(device, quick=True), Pool(device, torch.float32, 2**12)
    dense = list(products.measure_products(clock, pool, "fp32", quick=False))
    assert [(row.n, row.k, row.rows) for row in dense] == [(32, 16, (8, 16)), (16, 32, (8, 16))]
    assert all(len(row.forward) == len(row.weight_gradient) == 2 for row in dense)
    assert list(products.measure_experts(clock, quick=False)) == list(products.measure_fp8(clock, quick=False)) == []
    scores = list(attention.measure_attention(clock, "fp32", torch.float32, quick=False))
    assert {(row.backend, row.head_dim, row.lengths) for row in scores} == {
        ("cpu", 32, (16, 32)),
        ("cpu", 64, (16, 32)),
    }
    ops = {row.op: row for row in memory_bound.measure_memory_bound(clock, "fp32", torch.float32, quick=False)}
    assert set(ops) == set(OPS) - {"cast"}  # fp32 weights need none
    assert ops["rotated_heads"].backward_us and not ops["adamw"].backward_us
    bf16 = {row.op for row in memory_bound.measure_memory_bound(clock, "bf16", torch.bfloat16, quick=True)}
    assert bf16 == set(OPS)
