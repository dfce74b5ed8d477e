"""Neighbouring layouts: data parallelism makes up for what a degree gives or takes."""

from dataclasses import replace

import pytest

from shardwise.planner.explanation import binding
from shardwise.planner.neighbours import Neighbour, neighbours, spread
from shardwise.planner.single import judge
from shardwise.planner.stacks import STACKS
from shardwise.spec import Cluster, Layout, Recipe
from shardwise.spec.memory import GIB
from shardwise.spec.presets import model_preset


@pytest.mark.parametrize(
    ("layout", "gpus", "changes", "expected"),
    [
        ({"dp_shard": 8, "tp": 8}, 64, {"tp": 4}, {"dp_shard": 16, "tp": 4, "zero": 3}),
        ({"dp_replicate": 2, "dp_shard": 4}, 8, {"tp": 2}, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
        ({"dp_replicate": 8}, 8, {"tp": 2}, {"dp_replicate": 4, "dp_shard": 1, "zero": 0}),
        ({"dp_shard": 2, "zero": 2}, 2, {"tp": 2}, {"dp_shard": 1, "zero": 0}),
        ({"tp": 8}, 8, {"tp": 4}, {"dp_shard": 2, "zero": 3}),
        ({"tp": 2, "pp": 4}, 8, {"tp": 1}, {"dp_shard": 2, "zero": 2}),
        ({"dp_shard": 8}, 128, {}, {"dp_shard": 128}),
    ],
)
def test_spread(layout, gpus, changes, expected):
    result = spread(Layout.load(layout), gpus, **changes)
    assert result.world == gpus
    assert {name: getattr(result, name) for name in expected} == expected


def test_spread_says_why_it_cannot():
    assert spread(Layout.load({"dp_shard": 8}), 8, tp=3) == "tp · cp · pp = 3 does not divide the 8 chips"
    text = spread(Layout.load({"dp_replicate": 4, "dp_shard": 2}), 8, tp=4)
    assert text == "tp · cp · pp · dp_replicate = 16 does not divide the 8 chips"


def found_of(layout, **recipe):
    layout = Layout.load(layout)
    cluster = Cluster.load({"gpu": "h100-sxm", "gpus": layout.world})
    recipe = Recipe.load({"sequence": 4096, "batch_tokens": 2**19, **recipe})
    return judge(model_preset("llama3-8b"), layout, cluster, recipe, STACKS["shardwise"]), recipe


def test_every_choice_has_its_neighbours_and_all_fill_the_cluster():
    found, recipe = found_of({"dp_shard": 4, "tp": 4, "pp": 4, "zero": 2, "schedule": "interleaved",
                              "virtual_stages": 4, "micro_batch": 2})  # fmt: skip
    others = neighbours(found, recipe)
    fields = {item.change.split()[0] for item in others}
    assert fields == {"tp", "cp", "pp", "dp_replicate", "micro_batch", "zero", "recompute", "schedule",
                      "virtual_stages", "loss", "offload"}  # fmt: skip
    assert {item.layout.world for item in others if item.layout} == {64}
    able = [item.step_change for item in others if item.reason is None]
    assert able == sorted(able)
    assert [item.reason is None for item in others] == sorted([item.reason is None for item in others], reverse=True)
    assert found.layout not in [item.layout for item in others]


def test_lines_are_as_in_the_manual():
    layout = Layout.load({})
    assert Neighbour("tp 8 → 4", layout, -0.112, 9.3 * GIB, "fits").line() == "tp 8 → 4: −11 % step, +9.3 GiB"
    assert Neighbour("a", layout, 0.0312, -0.01 * GIB, "oom").line() == "a: +3.1 % step, ±0.0 GiB, does not fit"
    assert Neighbour("a", reason="because").line() == "a: not possible: because"


def test_what_binds():
    found, _ = found_of({"dp_shard": 8})
    faster = Neighbour("x", found.layout, -0.1, 1.0, "oom")
    assert binding(found, []).what == "compute"
    assert binding(found, [faster]).what == "memory"
    assert binding(found, [replace(faster, step_change=-0.001)]).what == "compute"
    assert binding(found, [replace(faster, verdict="fits")]).what == "compute"
    assert binding(replace(found, verdict="oom"), []).what == "memory"
    parts = {**found.step.parts, "bubble": 10 * found.step.seconds}
    assert binding(replace(found, step=replace(found.step, parts=parts)), []).what == "bubble"
    parts = {**found.step.parts, "tensor": 10 * found.step.seconds}
    assert binding(replace(found, step=replace(found.step, parts=parts)), []).what == "communication"
