"""Blocks with experts and with latent attention: the planner's memory is what the rehearsal finds, part by part."""

from __future__ import annotations

from typing import Any

import pytest

from memory_trace import example
from same_machine import compare
from shardwise.planner.memory.block_tape import block_of
from shardwise.planner.memory.experts_tape import experts_block
from shardwise.planner.memory.saved_tape import Gradient
from shardwise.planner.memory.weights import routed_weights
from shardwise.spec import Model
from shardwise.spec.presets import model_preset

EXPERTS = {"count": 8, "top_k": 2, "ffn": 512}
SMALL = {"name": "small", "layers": 3, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocabulary": 4096}
LATENT = {"query_rank": 192, "kv_rank": 128, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}
DEEPSEEK = {
    **{key: value for key, value in SMALL.items() if key != "kv_heads"},
    "latent": LATENT,
    "experts": {**EXPERTS, "dense_layers": 1, "shared_ffn": 512, "router": "sigmoid", "router_bias": True},
}
MIXTRAL = {**SMALL, "experts": EXPERTS}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FSDP": (MIXTRAL, {"dp_shard": 4}),
    "more ranks than experts": (MIXTRAL, {"dp_shard": 16, "recompute": "full"}),
    "EP over all ranks": (MIXTRAL, {"dp_shard": 8, "ep": 8}),
    "EP over some": (MIXTRAL, {"dp_shard": 8, "ep": 2, "recompute": "full", "loss": "chunked"}),
    "EP that cuts experts": (MIXTRAL, {"dp_shard": 8, "tp": 2, "ep": 8, "zero": 2}),
    "TP": (MIXTRAL, {"tp": 2, "zero": 0, "recompute": "selective"}),
    "ZeRO-1": (MIXTRAL, {"dp_shard": 4, "ep": 2, "zero": 1}),
    "latent attention": (DEEPSEEK, {"dp_shard": 4, "ep": 4}),
    "latent attention, TP": (DEEPSEEK, {"dp_shard": 2, "tp": 2, "ep": 4, "recompute": "full"}),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_are_those_of_the_rehearsal(case: str) -> None:
    model, layout = CASES[case]
    run = example({**model, "max_sequence": 2048}, 2048, **layout)
    (one,) = compare([run])
    assert not one.disagreements, str(one)


def test_experts_are_shared_by_the_ranks_that_hold_the_same() -> None:
    model = model_preset("mixtral-8x7b")
    one = 3 * 4096 * 14336
    apart = routed_weights(model, 1, 8, 64)  # a whole expert each, shared by 8: within it
    assert (apart.whole, apart.shard, apart.padded) == (one, one / 8, one)
    unshared = routed_weights(model, 8, 4, 0)  # zero 0
    assert unshared.whole == unshared.shard == 2 * one
    padded = routed_weights(model, 1, 1, 16)  # FSDP2 cuts the list of 8
    assert (padded.whole, padded.shard, padded.padded) == (8 * one, one, 16 * one)


@pytest.mark.parametrize("gradient", ["sharded", "first", "more", "bucket", "moved", "later"])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2)])
def test_a_backward_leaves_gradients_alone(policy: str, gradient: Gradient, tp: int, ep: int) -> None:
    """Whatever a block has kept, and whatever its backward has made, is dropped in its end, unless weights' gradients
    are still to come; gradients stay once."""
    model = Model.load({**MIXTRAL, "max_sequence": 2048, "experts": {**EXPERTS, "shared_ffn": 256}})
    casts = gradient != "sharded"
    dense = block_of(model, tp, 1, "allgather", 1, 256, 2, casts)
    block = experts_block(dense, model, tp, 1, ep, 1 if gradient == "sharded" else 0, 1, 256, 0, reduces=True)
    tape = block.tape(policy, gradient, False)
    tape.keep()
    tape.backward()
    gradients, gathered, activations, logits, transient = tape.parts
    assert logits == 0
    if gradient == "later":
        assert activations > 0 or transient > 0
        return
    assert activations == pytest.approx(0, abs=1) and transient == pytest.approx(0, abs=1)
    expected = {"sharded": 0, "first": 4, "more": 0, "bucket": 0, "moved": -4}[gradient] * block.weights
    assert gradients == pytest.approx(expected)
    assert gathered == pytest.approx(2 * block.weights if gradient == "sharded" else 0, abs=1)
