"""One function says what a precision makes of a Subject; rates and memory follow it."""

from dataclasses import replace

import pytest

from shardwise.planner.explain import utilisation
from shardwise.planner.memory import predict_memory
from shardwise.planner.single import judge
from shardwise.planner.stacks import own_stack
from shardwise.planner.step import predict_step
from shardwise.planner.subject import dtype_of, subject_of
from shardwise.spec import Cluster, InputError, Layout, Precision, Recipe
from shardwise.spec.presets import gpu_preset, model_preset


def subject(precision, *, gpu="h100-sxm", gpus=8, model="llama3-8b", sequence=4096, **layout):
    cluster = Cluster.load({"gpu": gpu, "gpus": gpus})
    recipe = Recipe.load({"sequence": sequence, "precision": precision})
    chosen = Layout.load({"dp_shard": gpus, **layout})
    return subject_of(model_preset(model), chosen, cluster, own_stack(cluster.gpu), recipe, 1)


@pytest.mark.parametrize(
    ("name", "dtype", "gathered"),
    [("bf16", "bf16", 2), ("fp16", "bf16", 2), ("fp8", "fp8", 2), ("fp4", "fp4", 2), ("fp32", "fp32", 4),
     ("fp64", "fp64", 8)],
)  # fmt: skip
def test_what_a_precision_makes_of_a_subject(name, dtype, gathered):
    precision = Precision.load(name)
    assert (dtype_of(precision), precision.name) == (dtype, name)
    made = subject(name)
    assert (made.dtype, made.gather_bytes) == (dtype, gathered)
    assert made.gradient_bytes == (8 if name == "fp64" else 4)
    assert Precision.load(precision.dump()) == precision


def test_names_of_precisions():
    assert Precision.load("nvfp4").name == "fp4"
    assert Precision.load({"compute": "fp16", "products": "fp8"}).name == "custom fp8"
    assert Precision.load({"reduce": "bf16"}).name == "custom bf16"
    with pytest.raises(InputError, match="products fp8 needs compute bf16 or fp16, not fp32; nearest: bf16"):
        Precision.load({"compute": "fp32", "products": "fp8"})


def test_fp16_is_priced_as_bf16():
    assert predict_step(subject("fp16")) == predict_step(subject("bf16"))


def test_narrow_products_are_faster_and_the_rest_is_not():
    seconds = {name: predict_step(subject(name, gpu="b200-sxm")).seconds for name in ("bf16", "fp8", "fp4")}
    assert seconds["bf16"] > seconds["fp8"] > seconds["fp4"]
    assert seconds["bf16"] / seconds["fp8"] < 1.7  # attention, traffic and head stay in bf16
    wide, narrow = (utilisation(subject(name), 10_000)[0] for name in ("bf16", "fp8"))
    assert wide == pytest.approx(2 * narrow, rel=1e-3)  # of the dtype's own peak


def test_narrow_operands_are_temporary():
    """What is saved, gathered and reduced stays as it is; the copies of one product's operands come on top."""
    piped = {"dp_shard": 4, "pp": 2, "zero": 2, "micro_batch": 2}  # the first rank has no loss
    one, other = (
        predict_memory(replace(subject(name, **piped), micro_batches=2), stage_rank=0) for name in ("bf16", "fp8")
    )
    for part in ("parameters", "gradients", "optimizer", "gathered", "activations", "logits"):
        assert getattr(other, part) == getattr(one, part)
    model, tokens = model_preset("llama3-8b"), 2 * 4096
    operands = tokens * (model.hidden + 2 * model.ffn) + model.hidden * 2 * model.ffn
    assert one.event == other.event == "block backward"
    assert other.transient - one.transient == pytest.approx(operands)


def test_other_software_is_as_before():
    """The published runs are scored with it (docs/accuracy.md)."""
    from shardwise.planner.stacks import STACKS

    one, other = (replace(subject(name), stack=STACKS["torchtitan"]) for name in ("bf16", "fp8"))
    assert predict_memory(one).live == predict_memory(other).live


def test_fp32_on_a_cpu():
    """A rank is one core: no CUDA context, no NCCL, and communication hides behind nothing."""
    layouts = ({"dp_shard": 2, "zero": 3}, {"dp_shard": 1, "dp_replicate": 2})
    sharded, replicated = (
        subject("fp32", gpu="cpu", gpus=2, model="tiny-llama", sequence=256, micro_batch=16, **layout)
        for layout in layouts
    )
    memory = predict_memory(sharded)
    assert memory.communication == 0
    assert memory.outside < 0.5 * 2**30
    slow, fast = predict_step(sharded), predict_step(replicated)
    assert slow.parts["data"] > fast.parts["data"] > 0
    assert slow.seconds > fast.seconds


def test_an_unknown_rate_names_the_known_ones():
    cluster = Cluster.load({"gpu": "h200-sxm", "gpus": 8})
    recipe = Recipe.load({"sequence": 4096, "precision": "fp4"})
    with pytest.raises(InputError, match="h200-sxm: its peak rate for fp4 is not known; known: bf16, fp8"):
        judge(model_preset("llama3-8b"), Layout.load({"dp_shard": 8}), cluster, recipe, own_stack(cluster.gpu))
    bare = gpu_preset("cpu").model_copy(update={"peak_tflops": {}})
    with pytest.raises(InputError, match="known: of no dtype"):
        own_stack(bare).speed(bare, "fp32")
