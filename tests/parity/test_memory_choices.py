"""What saves memory or overlaps trains the same model: recompute, offload, ZeRO-1, prefetch, buckets, compile."""

import pytest
import torch
from matrix import ALL, compare, failures, make_run, numbers, reference, refusals

from shardwise.parallel import compile as compile_blocks
from shardwise.spec import Run
from shardwise.training.parity import Trained

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
    "selective, EP×2 over TP×2": {"tp": 2, "ep": 2, "recompute": "selective"},
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
}


CASES = [
    pytest.param(layout, model, id=f"{layout}-{model}")
    for layout, degrees in LAYOUTS.items()
    for model in ("llama", "deepseek")
    if not refusals(model, degrees)
    if model == "llama" or any(word in layout for word in ("EP", "full", "selective, FSDP×2, zero 3", "ZeRO-1"))
]


@pytest.mark.parametrize(("layout", "model"), CASES[:: 1 if ALL else 2])
def test_layout_trains_the_same_model(ranks, layout, model):
    run = make_run(model, LAYOUTS[layout], "fp64")
    found = ranks(run.layout.world).run(compare_with_small_limits, run, reference(ranks, model, "fp64"))
    assert not failures(found, "fp64")


def test_every_layout_trains_some_model():
    assert {case.values[0] for case in CASES} == LAYOUTS.keys()


def compare_with_small_limits(run: Run, expected: Trained) -> dict[str, float]:
    """As if the model were large: several buckets, and no tensor too small to be offloaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.parallel.offload.SMALLEST", 1)
        patch.setattr("shardwise.training.sharded_optimizer.BUCKET", 5000)
        patch.setattr("shardwise.training.offloaded_optimizer.BUCKET", 5000)
        return compare(run, expected)


def compare_compiled(run: Run, expected: Trained, backend: str) -> dict[str, float]:
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_blocks, "BACKEND", backend)
        return compare(run, expected)


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


@pytest.mark.parametrize("layout", COMPILED)
def test_compiled_blocks_train_the_same_model(ranks, layout):
    model = "gpt" if layout in ("one process", "TP×2, full") else "llama"
    run = make_run(model, {**COMPILED[layout], "compile": True}, "fp32", 2)
    found = ranks(run.layout.world).run(compare_compiled, run, reference(ranks, model, "fp32"), "aot_eager")
    assert not failures(found, "fp32")


def test_inductor_trains_the_same_model(ranks):
    run = make_run("llama", {"compile": True, "recompute": "selective"}, "fp32", 2)
    found = ranks(1).run(compare_compiled, run, reference(ranks, "llama", "fp32"), "inductor")
    assert not failures(found, "fp32")


NARROW = {"DDP×2": {"dp_replicate": 2}, "FSDP×2": FSDP3, "ZeRO-1×2": {"dp_shard": 2, "zero": 1},
          "DDP×2 × TP×2": {"dp_replicate": 2, "tp": 2}}  # fmt: skip


@pytest.mark.parametrize("layout", NARROW)
def test_gradients_summed_in_bf16(ranks, layout):
    """Rounded to 8 bits on their way, and only there."""
    run = make_run("gpt", NARROW[layout], "fp32", 1)
    precision = run.recipe.precision.model_copy(update={"reduce": "bf16"})
    narrow = run.replace(recipe=run.recipe.model_copy(update={"precision": precision}))
    exact = reference(ranks, "gpt", "fp32")
    for found in ranks(run.layout.world).run(numbers, narrow, exact):
        assert 1e-6 < abs(found["norms"][0] / exact.norms[0] - 1) < 2**-8
        assert found["losses"] == pytest.approx(exact.losses, rel=1e-3)
