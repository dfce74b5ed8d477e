"""Every refusal names the nearest legal value, and that value is legal."""

import os

import pytest

from shardwise.planner.memory import predict_memory, verdict
from shardwise.planner.search import search
from shardwise.planner.stacks import STACKS, own_stack
from shardwise.planner.subject import Subject
from shardwise.spec import InputError, load_run
from shardwise.spec.legality import divisors, nearest_divisor
from shardwise.spec.presets import gpu_preset
from shardwise.spec.trainable import require_trainable
from shardwise.verbs.resolve import resolve_layout

RUN = {
    "model": "tiny-gpt",
    "cluster": {"gpu": "cpu"},
    "recipe": {"sequence": 256, "batch_tokens": 256 * 12, "steps": 4},
}


def check(world, **layout):
    require_trainable(load_run({**RUN, "layout": layout}), world)


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert nearest_divisor(12, 5) == 4
    assert nearest_divisor(7, 3) == 1


def test_legal_layouts():
    check(1)
    check(1, zero=3)
    check(4, dp_replicate=4)
    check(4, dp_shard=4, zero=2)
    check(6, dp_replicate=2, dp_shard=3, micro_batch=2)


@pytest.mark.parametrize(
    ("world", "layout", "message"),
    [
        (4, {"dp_shard": 4, "zero": 0}, "set zero: 3, or dp_replicate: 4"),
        (4, {"dp_replicate": 4, "zero": 3}, "set zero: 0"),
        (2, {"dp_shard": 2, "micro_batch": 4}, "layout.micro_batch 3"),
        (5, {"dp_shard": 5}, "batch_tokens 2560, or 4 data ranks"),
        (4, {"dp_shard": 2}, "makes 2 ranks, but 4 are started; use --nproc 2"),
        (3, {"tp": 3}, "does not divide model.heads 4; nearest: 2"),
        (2, {"pp": 2, "schedule": "zbv", "virtual_stages": 2}, "the tied table of tiny-gpt twice"),
        (2, {"pp": 2, "schedule": "interleaved-zb", "virtual_stages": 2, "compile": True}, "schedule 1f1b or inter"),
        (1, {"async_tp": True}, "needs compile: true and tp of at least 2"),
        (2, {"async_tp": True, "compile": True, "tp": 2}, "needs CUDA, and cluster.gpu is cpu"),
        (1, {"offload": "parameters"}, "zero is 0; nearest: zero: 3, or offload: optimizer"),
        (1, {"offload": "activations", "recompute": "selective"}, "nearest: recompute: full, or offload: none"),
        (2, {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "recompute": "full"}, "what works: recompute: none"),
        (
            2,
            {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "offload": "activations"},
            "memory grows from step to step",
        ),
        (3, {"cp": 3}, r"recipe.sequence 256 is not a multiple of 6 \(2 · cp 3 · tp 1\); nearest: 258"),
        (8, {"cp": 8, "cp_method": "ulysses"}, "does not divide the 4 of model.kv_heads 4 .* nearest: cp 4"),
        (8, {"cp": 4, "tp": 2, "cp_method": "ulysses"}, "a rank of tp 2 has; nearest: cp 2, or cp_method: allgather"),
        (2, {"cp": 2, "cp_method": "ring", "compile": True}, "cp_method: allgather, or compile: false"),
    ],
)
def test_illegal_layouts(world, layout, message):
    with pytest.raises(InputError, match=message):
        check(world, **layout)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("recipe.batch_tokens", "null", "batch_tokens is required"),
        ("recipe.steps", "null", "recipe.steps or recipe.tokens is required"),
        ("recipe.sequence", "1024", "nearest: 512"),
        ("recipe.precision", "{parameters: bf16}", "nearest: fp32"),
        ("recipe.precision", "{compute: fp64}", "nearest: fp32"),
        ("recipe.precision", "{reduce: fp16}", "nearest: fp32, or bf16"),
        ("recipe.precision", "fp8", "products in fp8 cannot be trained by this version, only planned"),
        ("recipe.precision", "nvfp4", "products in fp4 cannot be trained by this version, only planned"),
    ],
)
def test_recipes_that_cannot_be_trained(path, value, message):
    with pytest.raises(InputError, match=message):
        require_trainable(load_run({**RUN, "layout": {}}, [(path, value)]), 1)


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)])
def test_auto_spreads_over_all_ranks(world, micro_batch):
    run = resolve_layout(load_run(RUN), world)
    assert (run.layout.dp_shard, run.layout.micro_batch, run.cluster.gpus) == (world, micro_batch, world)
    require_trainable(run, world)


@pytest.mark.parametrize(
    ("model", "gpu", "world"), [("gpt2-124m", "h100-sxm", 8), ("llama3-8b", "h200-sxm", 8), ("llama3.2-1b", "l4", 8)]
)
def test_auto_is_the_planners_choice_where_it_knows_the_chip(model, gpu, world):
    recipe = {"sequence": 1024, "batch_tokens": 1024 * 512, "steps": 4}
    run = resolve_layout(load_run({"model": model, "cluster": {"gpu": gpu}, "recipe": recipe}), world)
    require_trainable(run, world)
    memory = predict_memory(Subject(run.model, run.layout, run.cluster, STACKS["shardwise"], 1024, 1))
    assert verdict(memory, run.cluster.gpu) == "fits"


def test_auto_refuses_what_cannot_fit():
    run = {"model": "llama3-405b", "cluster": {"gpu": "h100-sxm"}, "recipe": {"sequence": 8192, "batch_tokens": 65536}}
    with pytest.raises(InputError, match=r"leanest needs \d+ GiB of 79"):
        resolve_layout(load_run(run), 8)


CPU = {"model": "tiny-llama", "cluster": {"gpu": "cpu"},
       "recipe": {"sequence": 256, "batch_tokens": 8192, "precision": "fp32", "steps": 4}}  # fmt: skip


def test_auto_is_the_planners_choice_on_a_cpu():
    run = resolve_layout(load_run(CPU), 2)
    require_trainable(run, 2)
    best = search(run.model, run.cluster, run.recipe, own_stack(run.cluster.gpu)).found[0]
    assert run.layout == best.layout
    assert run.cluster.gpu == gpu_preset("cpu")  # this machine's memory stays out of the Run


def test_auto_on_a_cpu_stays_within_the_machines_memory(monkeypatch):
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2 * 2**30 // 4096}  # 1 GiB a rank, most of which the system takes
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    with pytest.raises(InputError, match="no layout of gpt2-124m .* fits 2 × cpu"):
        resolve_layout(load_run(CPU, [("model", "gpt2-124m")]), 2)


def test_auto_keeps_micro_batches_small():
    run = resolve_layout(load_run(RUN, [("recipe.batch_tokens", str(256 * 1200))]), 2)
    assert run.layout.micro_batch == 60  # the largest divisor of 600 with at most 16,384 tokens


def test_auto_says_which_world_divides_the_batch():
    with pytest.raises(InputError, match="nearest: 4 ranks, or batch_tokens 2560"):
        resolve_layout(load_run(RUN), 5)
