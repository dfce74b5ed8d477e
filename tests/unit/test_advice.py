"""Advice: given where a better choice is predicted, with that prediction's figure, and not otherwise."""

import datetime

import pytest

from shardwise.planner.advice import advise
from shardwise.planner.advice_case import Case
from shardwise.planner.price import choose_price
from shardwise.planner.single import judge
from shardwise.planner.stacks import STACKS
from shardwise.spec import Cluster, Layout, Recipe
from shardwise.spec.presets import gpu_preset, model_preset, prices

TODAY = datetime.date(2026, 11, 29)


def case_of(layout, *, model="llama3-8b", gpu="h100-sxm", hours=None, changes=None, **recipe):
    layout = Layout.load(layout)
    cluster = Cluster.load({"gpu": gpu, "gpus": layout.world, "gpus_per_node": 8})
    recipe = Recipe.load({"sequence": 4096, "batch_tokens": 2**20, **recipe})
    named = model_preset(model).model_copy(update=changes or {})
    return Case(judge(named, layout, cluster, recipe, STACKS["shardwise"]), recipe, hours, prices(), TODAY)


def topics(case):
    return {item.topic: item for item in advise(case)}


def again(case, model=None, **changes):
    """The same Run's prediction with fields of its layout changed."""
    subject = case.found.subject
    layout = Layout.load({**case.layout.model_dump(), **changes})
    return judge(model or subject.model, layout, subject.cluster, case.recipe, subject.stack)


def saving(case, other):
    return 1 - case.found.tokens_per_second / other.tokens_per_second


def test_tensor_parallelism_before_it_is_needed():
    case = case_of({"tp": 8, "recompute": "selective"})
    advice = topics(case)["tensor parallelism"]
    other = again(case, tp=1, dp_shard=8, zero=3)
    assert other.verdict == "fits"
    assert advice.gain == pytest.approx(saving(case, other))
    assert "tp 1 (dp_shard 8, recompute selective) fits" in advice.text
    assert "tensor parallelism" not in topics(case_of({"dp_shard": 8}))


def test_tensor_parallelism_that_the_model_needs():
    case = case_of({"dp_shard": 2, "tp": 8, "pp": 8, "zero": 2, "recompute": "selective"}, model="llama3-405b")
    assert case.found.verdict == "oom"
    assert not set(topics(case)) & {"tensor parallelism", "ZeRO-3", "recompute", "micro-batch"}


def test_tensor_parallelism_beyond_the_fast_link():
    # 8 KV heads allow no more than tp 8, so a chip that shares its fast link with 3 others has to do.
    gpu = gpu_preset("h100-sxm").model_copy(update={"domain": 4})
    case = case_of({"tp": 8, "recompute": "selective"}, gpu=gpu)
    assert "do not share the fast link of 4 chips" in topics(case)["tensor parallelism"].text


@pytest.mark.parametrize(
    ("layout", "model", "gpu", "change"),
    [
        ({"dp_shard": 8}, "gpt2-774m", "a100-40-sxm", {"zero": 0, "dp_replicate": 8, "dp_shard": 1}),
        ({"dp_shard": 4, "pp": 4, "zero": 3, "recompute": "selective"}, "llama3-8b", "a100-80-sxm", None),
    ],
)
def test_zero3_where_the_model_fits_without(layout, model, gpu, change):
    case = case_of(layout, model=model, gpu=gpu, sequence=1024, batch_tokens=2**17)
    advice = topics(case)["ZeRO-3"]
    assert advice.gain >= 0.01
    if change:
        assert advice.gain == pytest.approx(saving(case, again(case, **change)))
    assert (f"once for each of {case.found.subject.micro_batches} micro-batches" in advice.text) == ("pp" in layout)
    assert "ZeRO-3" not in topics(case_of({**layout, "zero": 2}, model=model, gpu=gpu, sequence=1024))


def test_sharding_across_nodes_on_a_slow_network():
    slow = gpu_preset("h100-sxm").model_dump(by_alias=True)
    case = case_of({"dp_shard": 64, "recompute": "selective"}, gpu={**slow, "inter": "nic-25g"})
    advice = topics(case)["sharding across nodes"]
    assert advice.gain == pytest.approx(saving(case, again(case, dp_shard=8, dp_replicate=8)))
    assert "sharding across nodes" not in topics(case_of({"dp_shard": 8, "recompute": "selective"}))


def test_recompute_that_is_not_needed():
    case = case_of({"dp_shard": 8, "recompute": "full"})
    advice = topics(case)["recompute"]
    best = max((again(case, recompute=policy) for policy in ("none", "selective")), key=lambda it: it.tokens_per_second)
    assert best.verdict == "fits"
    assert advice.gain == pytest.approx(saving(case, best))
    assert "recompute" not in topics(case_of({"dp_shard": 8, "micro_batch": 2}))


def test_a_small_micro_batch_with_memory_left():
    case = case_of({"dp_replicate": 8, "zero": 0}, model="gpt2-124m", sequence=1024, batch_tokens=2**19,
                   changes={"vocabulary": 50304})  # fmt: skip
    advice = topics(case)["micro-batch"]
    assert advice.gain > 0.05
    assert "leaves" in advice.text
    assert "micro-batch" not in topics(case_of({"dp_replicate": 8, "zero": 0, "micro_batch": 64}, model="gpt2-124m",
                                               sequence=1024, batch_tokens=2**19))  # fmt: skip


def test_a_vocabulary_that_is_no_multiple_of_8():
    case = case_of({"micro_batch": 64}, model="gpt2-124m", gpu="h200-sxm", sequence=1024, batch_tokens=2**19)
    advice = topics(case)["alignment"]
    padded = case.model.model_copy(update={"vocabulary": 50304})
    assert advice.gain == pytest.approx(saving(case, again(case, model=padded)))
    assert 1 / (1 - advice.gain) == pytest.approx(1.6, abs=0.15)  # what one H200 showed
    padded_case = case_of({"micro_batch": 64}, model="gpt2-124m", sequence=1024, changes={"vocabulary": 50304})
    assert "alignment" not in topics(padded_case)


def test_low_precision_without_validation():
    advice = topics(case_of({"dp_shard": 8}, precision="fp8"))["precision"]
    assert advice.risk
    assert "compare with a short run in bf16" in advice.text
    watched = case_of({"dp_shard": 8}, precision="fp8", evaluation={"every": 100})
    assert "precision" not in topics(watched)


def test_a_capacity_factor_drops_tokens():
    model = model_preset("mixtral-8x7b")
    dropping = model.experts.model_copy(update={"capacity_factor": 1.25})
    layout = {"dp_shard": 64, "ep": 8}
    advice = topics(case_of(layout, model="mixtral-8x7b", changes={"experts": dropping}))["capacity factor"]
    assert "drops what an expert gets beyond 1.25 times" in advice.text
    assert "capacity factor" not in topics(case_of(layout, model="mixtral-8x7b"))


def test_fp16_where_there_is_bf16():
    advice = topics(case_of({"dp_shard": 8}, precision="fp16"))["precision"]
    assert advice.risk
    assert "989 TFLOP/s" in advice.text
    assert "precision" not in topics(case_of({"dp_shard": 8}))


def test_the_work_that_a_failure_loses():
    case = case_of({"dp_shard": 8}, hours=100.0)
    advice = topics(case)["checkpoints"]
    price = choose_price(prices(), "h100-sxm", TODAY).usd_per_gpu_hour
    assert advice.risk
    assert f"100.0 hours, 800 GPU-hours ({800 * price:,.0f} USD)" in advice.text
    assert "0.016 failures" in advice.text  # 800 of 50,700 GPU-hours
    hour = int(3600 / case.found.step.seconds)
    assert "checkpoints" not in topics(case_of({"dp_shard": 8}, hours=100.0, checkpoint={"every": hour}))
    late = topics(case_of({"dp_shard": 8}, hours=100.0, checkpoint={"every": 5 * hour}))["checkpoints"]
    assert "loses up to 5.0 hours" in late.text
    for hours in (2.0, None):
        assert "checkpoints" not in topics(case_of({"dp_shard": 8}, hours=hours))


def test_evaluation():
    assert "no validation loss is ever" in topics(case_of({"dp_shard": 8}, evaluation={"tokens": 0}))["evaluation"].text
    assert "after 50 hours" in topics(case_of({"dp_shard": 8}, hours=50.0))["evaluation"].text
    assert "evaluation" not in topics(case_of({"dp_shard": 8}, hours=50.0, evaluation={"every": 100}))
    assert "evaluation" not in topics(case_of({"dp_shard": 8}, hours=1.0))


def test_a_dear_card_for_a_run_of_minutes():
    case = case_of({"micro_batch": 4}, model="gpt2-124m", sequence=1024, batch_tokens=2**16, hours=0.02)
    advice = topics(case)["debugging"]
    assert "l4 at 0.78" in advice.text
    assert not advice.risk
    assert advice.gain is None
    for other in ({"hours": 2.0}, {"hours": 0.02, "gpu": "l4"}):
        assert "debugging" not in topics(case_of({"micro_batch": 4}, model="gpt2-124m", sequence=1024, **other))
    large = case_of({"dp_shard": 8, "recompute": "full"}, hours=0.1)
    assert "l40s at 1.40" in topics(large)["debugging"].text  # an l4 is cheaper and too small


def test_risks_come_first_and_then_the_dearest():
    given = advise(case_of({"tp": 8, "recompute": "full"}, precision="fp16", hours=50.0))
    assert [item.risk for item in given] == sorted((item.risk for item in given), reverse=True)
    gains = [item.gain for item in given if item.gain is not None]
    assert gains == sorted(gains, reverse=True)
    assert all(item.source for item in given)
