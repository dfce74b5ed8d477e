"""`verify` trains a Run of the same kind as the user's, not just any small one."""

import pytest

from shardwise.spec import InputError, load_run
from shardwise.spec.legality import illegal
from shardwise.verbs.scaled import one_process, scale_down

LAYOUTS = {
    "one process": {},
    "DDP": {"dp_replicate": 64},
    "HSDP": {"dp_replicate": 8, "dp_shard": 8, "zero": 2},
    "ZeRO-1": {"dp_shard": 16, "zero": 1},
    "FSDP × TP": {"dp_shard": 8, "tp": 8},
    "TP beyond the KV heads": {"tp": 16},
    "CP, Ulysses": {"cp": 2, "cp_method": "ulysses", "dp_shard": 4},
    "CP, ring": {"cp": 4, "cp_method": "ring", "tp": 2, "micro_batch": 4},
    "PP": {"pp": 8, "schedule": "1f1b", "dp_shard": 4, "zero": 2},
    "PP, interleaved": {"pp": 4, "schedule": "interleaved", "virtual_stages": 4, "tp": 4, "dp_shard": 2},
    "PP, zbv": {"pp": 4, "schedule": "zbv", "virtual_stages": 2, "dp_shard": 2, "zero": 2},
    "PP, dualpipev": {"pp": 4, "schedule": "dualpipev", "virtual_stages": 2},
    "EP, all ranks": {"dp_shard": 8, "ep": 8},
    "EP, a part": {"dp_shard": 32, "ep": 8},
    "EP over FSDP × TP": {"dp_shard": 8, "tp": 4, "ep": 8},
    "recompute": {"dp_shard": 8, "recompute": "every:4", "offload": "optimizer"},
    "√n": {"dp_shard": 8, "recompute": "sqrt", "loss": "chunked"},
    "compiled": {"tp": 8, "compile": True, "async_tp": True},
}
MODELS = ["gpt2-124m", "llama3-8b", "llama3-70b", "qwen2.5-0.5b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b",
          "deepseek-v3", "tiny-llama", "tiny-moe"]  # fmt: skip
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "virtual_stages")


def make_run(model, layout, **recipe):
    recipe = {"sequence": 512, "batch_tokens": 512 * 1024, **recipe}
    return load_run({"model": model, "cluster": {"gpu": "h100-sxm"}, "layout": layout, "recipe": recipe})


def allowed(model, layout):
    run = make_run(model, layout)
    return not list(illegal(run.model, run.layout, run.recipe))


CASES = [(model, name) for name in LAYOUTS for model in MODELS if allowed(model, LAYOUTS[name])]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_the_same_kind_but_small(model, layout):
    run = make_run(model, LAYOUTS[layout])
    scaled = scale_down(run, 8, "fp64")
    before, after = run.layout, scaled.layout
    assert not list(illegal(scaled.model, after, scaled.recipe))
    assert after.world <= 8
    for name in DEGREES:
        assert (getattr(after, name) > 1) == (getattr(before, name) > 1), name
    for name in ("zero", "schedule", "cp_method", "offload", "loss", "prefetch", "bucket_mb"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.recompute.split(":")[0] == before.recompute.split(":")[0]
    assert not after.compile and not after.async_tp
    assert (after.ep == after.dp_shard * after.cp * after.tp) == (before.ep == before.dp_shard * before.cp * before.tp)
    assert after.pp * after.virtual_stages <= scaled.model.layers <= run.model.layers

    small, large = scaled.model, run.model
    assert (small.kv_heads < small.heads) == (large.kv_heads < large.heads)
    assert small.latent or (small.kv_heads < after.tp) == (large.kv_heads < before.tp)
    assert (small.experts is None, small.latent is None) == (large.experts is None, large.latent is None)
    for name in ("tied", "qk_norm", "qkv_bias", "positions", "norm", "activation", "rope_scaling"):
        assert getattr(small, name) == getattr(large, name), name
    if small.experts:
        assert small.experts.dense_layers < small.layers
        assert (small.experts.shared_ffn > 0) == (large.experts.shared_ffn > 0)
        assert (small.experts.top_groups < small.experts.groups) == (large.experts.top_groups < large.experts.groups)
        assert small.experts.top_k < small.experts.count

    per_rank = scaled.recipe.batch_sequences // (after.data_ranks * after.micro_batch)
    assert per_rank >= 2, "batch_tokens asks for accumulation"
    alone = one_process(scaled)
    assert (alone.model, alone.recipe, alone.layout.world) == (scaled.model, scaled.recipe, 1)


def test_every_layout_is_allowed_for_some_model():
    assert {layout for _, layout in CASES} == LAYOUTS.keys()


def test_no_accumulation_where_there_is_none():
    scaled = scale_down(make_run("llama3-8b", {"dp_shard": 8}, batch_tokens=512 * 8), 8, "fp32")
    assert scaled.recipe.batch_sequences == scaled.layout.data_ranks
    assert scaled.recipe.precision.name == "fp32"


def test_a_model_may_stay_as_it_is():
    model = make_run("tiny-gpt", {}).model
    scaled = scale_down(make_run("tiny-gpt", {"tp": 4, "pp": 2}), 8, "fp64", model)
    assert scaled.model == model
    assert scaled.layout.world == 4


def test_too_many_dimensions_for_so_few_ranks():
    run = make_run("llama3-8b", {"pp": 2, "dp_shard": 4, "tp": 2, "cp": 2})
    with pytest.raises(InputError, match="--nproc 8: .* still has 16 ranks; nearest: --nproc 16"):
        scale_down(run, 8, "fp64")
    assert scale_down(run, 16, "fp64").layout.world == 16
