"""Every refusal names the nearest legal value, and that value is legal."""

import pytest

from shardwise.spec import InputError, load_run
from shardwise.spec.legality import divisors, nearest_divisor, require_trainable
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
        (2, {"tp": 2}, "what works: tp: 1"),
        (1, {"recompute": "full"}, "what works: recompute: none"),
        (2, {"dp_shard": 2, "zero": 1}, "what works: 0 .DDP., 2 or 3"),
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
        ("recipe.precision", "{reduce: bf16}", "nearest: fp32"),
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


def test_auto_keeps_micro_batches_small():
    run = resolve_layout(load_run(RUN, [("recipe.batch_tokens", str(256 * 1200))]), 2)
    assert run.layout.micro_batch == 60  # the largest divisor of 600 with at most 16,384 tokens


def test_auto_says_which_world_divides_the_batch():
    with pytest.raises(InputError, match="nearest: 4 ranks, or batch_tokens 2560"):
        resolve_layout(load_run(RUN), 5)
