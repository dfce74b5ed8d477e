"""What saves memory, and what overlaps, trains the same model: recompute, offload, ZeRO-1, prefetch, buckets, compile."""

import pytest
import torch
from test_parity import Result, _reference, largest_difference, make_run, train

from shardwise.parallel import compile as compile_blocks
from shardwise.spec import Run
from shardwise.spec.legality import illegal, untrainable

TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}
FSDP2, FSDP3, TP = {"dp_shard": 2, "zero": 2}, {"dp_shard": 2, "zero": 3}, {"tp": 2}
LAYOUTS = {
    **{
        f"{kind}, {where}": {**degrees, "recompute": kind}
        for kind in ("selective", "full", "every:3", "sqrt")
        for where, degrees in {"alone": {}, "FSDP×2, zero 2": FSDP2, "FSDP×2, zero 3": FSDP3, "TP×2": TP}.items()
    },
    "selective, FSDP×2 × TP×2": {"dp_shard": 2, "tp": 2, "recompute": "selective"},
    "full, DDP×2": {"dp_replicate": 2, "recompute": "full"},
    "sqrt, CP×2 ring, zero 3": {"cp": 2, "cp_method": "ring", "zero": 3, "recompute": "sqrt"},
    "selective, CP×2": {"cp": 2, "recompute": "selective"},
    "full, EP×2": {"dp_shard": 2, "ep": 2, "recompute": "full"},
    "selective, EP×2": {"dp_shard": 2, "ep": 2, "recompute": "selective"},
    "parameters, FSDP×2, zero 2": {**FSDP2, "offload": "parameters"},
    "parameters, FSDP×2, zero 3": {**FSDP3, "offload": "parameters"},
    "parameters, FSDP×2 × TP×2": {"dp_shard": 2, "tp": 2, "offload": "parameters"},
    "optimizer, alone": {"offload": "optimizer"},
    "optimizer, FSDP×2": {**FSDP3, "offload": "optimizer"},
    "optimizer, ZeRO-1×2": {"dp_shard": 2, "zero": 1, "offload": "optimizer"},
    "activations, alone": {"offload": "activations"},
    "activations, FSDP×2, zero 3": {**FSDP3, "offload": "activations"},
    "activations, TP×2": {**TP, "offload": "activations"},
    "activations, full, FSDP×2": {**FSDP3, "offload": "activations", "recompute": "full"},
    "activations, sqrt": {"offload": "activations", "recompute": "sqrt"},
    "ZeRO-1×2": {"dp_shard": 2, "zero": 1},
    "ZeRO-1×4": {"dp_shard": 4, "zero": 1},
    "ZeRO-1×2 × TP×2": {"dp_shard": 2, "tp": 2, "zero": 1},
    "ZeRO-1, 2×2": {"dp_replicate": 2, "dp_shard": 2, "zero": 1},
    "ZeRO-1×2 × CP×2": {"dp_shard": 2, "cp": 2, "zero": 1},
    "ZeRO-1×2 × PP×2": {"dp_shard": 2, "pp": 2, "zero": 1},
    "ZeRO-1×4, EP×2": {"dp_shard": 4, "ep": 2, "zero": 1},
    "prefetch 0": {**FSDP3, "prefetch": 0},
    "prefetch 2": {**FSDP3, "prefetch": 2},
    "small buckets": {"dp_replicate": 2, "bucket_mb": 1},
}


def allowed(model: str, layout: dict) -> bool:
    run = make_run(model, layout, "fp64", 1)
    return not [*illegal(run.model, run.layout, run.recipe), *untrainable(run.model, run.layout)]


CASES = [
    pytest.param(model, layout, precision, id=f"{layout}-{model}-{precision}")
    for layout, degrees in LAYOUTS.items()
    for model, precision in (("llama", "fp64"), ("gpt", "fp32"), ("deepseek", "fp64"))
    if allowed(model, degrees)
]


def same(result: Result, reference: Result, tolerance: float) -> None:
    assert largest_difference(result.initial, reference.initial) == 0
    assert result.losses == pytest.approx(reference.losses, abs=tolerance)
    assert result.norms == pytest.approx(reference.norms, abs=tolerance)
    assert largest_difference(result.final, reference.final) <= tolerance
    assert largest_difference(result.final, result.initial) > 1e-3


@pytest.mark.parametrize(("model", "layout", "precision"), CASES)
def test_layout_trains_the_same_model(ranks, monkeypatch, model, layout, precision):
    run = make_run(model, LAYOUTS[layout], precision, 1)
    for result in ranks(run.layout.world).run(train_with_small_limits, run):
        same(result, _reference(ranks, model, precision), TOLERANCE[precision])


def test_every_layout_trains_some_model():
    assert {case.values[1] for case in CASES} == LAYOUTS.keys()


def train_with_small_limits(run: Run) -> Result:
    """As if the model were large: several buckets, and no tensor too small to be offloaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.parallel.offload.SMALLEST", 1)
        patch.setattr("shardwise.training.sharded_optimizer.BUCKET", 5000)
        patch.setattr("shardwise.training.offloaded_optimizer.BUCKET", 5000)
        return train(run)


def train_compiled(run: Run, backend: str) -> Result:
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_blocks, "BACKEND", backend)
        return train(run)


COMPILED = {
    "one process": {},
    "FSDP×2": FSDP3,
    "TP×2": TP,
    "FSDP×2, selective": {**FSDP3, "recompute": "selective"},
    "TP×2, full": {**TP, "recompute": "full"},
    "TP×2, selective": {**TP, "recompute": "selective"},
    "FSDP×2 × TP×2, selective": {"dp_shard": 2, "tp": 2, "recompute": "selective"},
    "sqrt": {"recompute": "sqrt"},
    "FSDP×2, activations": {**FSDP3, "offload": "activations"},
}


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("layout", COMPILED)
def test_compiled_blocks_train_the_same_model(ranks, layout, model):
    run = make_run(model, {**COMPILED[layout], "compile": True}, "fp32", 2)
    for result in ranks(run.layout.world).run(train_compiled, run, "aot_eager"):
        same(result, _reference(ranks, model, "fp32"), TOLERANCE["fp32"])
