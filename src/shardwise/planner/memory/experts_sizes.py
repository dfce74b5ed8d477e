"""Sizes of a block with experts, for its tape (`experts_tape.py`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from shardwise.planner.memory.activations import IMBALANCE
from shardwise.planner.memory.block_tape import Block
from shardwise.planner.memory.latent_tape import LatentBlock
from shardwise.planner.memory.weights import Weights, cut_within, routed_weights
from shardwise.spec import Model

_INDEX = 8  # bytes


@dataclass(frozen=True)
class ExpertsSizes(LatentBlock):
    """Sizes of one block with experts: bytes of a micro-batch's tensors, elements of weights.

    Copies are those of the tokens that this rank weighs, rows those that its experts get: with expert parallelism
    (`away`) of its own tokens, and of others'. `up` and `down` are of the shared experts, `inner` is theirs.
    """

    copies: float = 0.0  # as wide as the hidden size
    rows: float = 0.0
    routed_inner: float = 0.0
    summed: float = 0.0  # one row of each token whose copies are weighed here
    wide_input: float = 0.0  # of the router
    scores: float = 0.0
    choices: tuple[float, ...] = ()  # a token's experts, their scores, the sum of these
    orders: tuple[float, ...] = ()  # of copies there and back, their weights, of rows
    router: float = 0.0  # elements
    routed_up: float = 0.0  # elements of one of their matrices
    shared: bool = False
    gate: float = 0.0  # of the shared experts: what is kept for it
    away: bool = False
    nested: Weights | None = None  # the routed experts, where they are a unit of FSDP2 of their own
    gathers: bool = False  # which the backward gathers
    cut: bool = False  # it cuts each expert
    alone: bool = False  # nobody else has the same
    reduces: bool = False  # in the end of its backward, not of the step
    before: float = 0.0  # bytes of the unit after the block that are being reduced
    ahead: float = 0.0  # bytes that are gathered for the unit before it
    stays: bool = False  # the experts are not given up

    @property
    def weights(self) -> float:
        matrices = 3 if self.gated else 2
        shared = (self.up * (matrices - 1) + self.down) * self.shared
        return self.attention + self.rest + self.router + self.routed_up * matrices + shared

    @property
    def largest(self) -> float:
        return max(super().largest, self.routed_up)

    def within(self, before: float, ahead: float, *, there: bool, stays: bool) -> tuple[Block, float, float]:
        if not self.nested:
            return self, before, ahead
        return replace(self, before=before, ahead=ahead, gathers=not there, stays=stays), 0.0, 0.0


def sizes_with_experts(
    block: Block,
    model: Model,
    tp: int,
    cp: int,
    ep: int,
    ranks: int,
    sequences: float,
    sequence: int,
    zero: int,
    *,
    reduces: bool,
) -> dict[str, Any]:
    """Of an ExpertsSizes. block: the dense one of the same model; ranks: that share the weights (`weights.sharding`);
    reduces: FSDP2 reduces gradients in the end of the block's backward."""
    experts = model.experts
    assert experts is not None
    width, wide = block.width, max(4, block.width)
    tokens, away = sequences * sequence / cp, ep > 1
    own = tokens / tp
    weighed = own if away else tokens
    copies = weighed * experts.top_k
    rows, ffn = (copies * IMBALANCE, float(experts.ffn)) if away else (copies, experts.ffn / tp)
    shares = max(1.0, ranks * tp / ep)
    shared = model.hidden * experts.shared_ffn / tp
    return {field.name: getattr(block, field.name) for field in fields(block)} | {
        "inner": width * tokens * experts.shared_ffn / tp,
        "up": shared,
        "down": shared,
        "rest": block.rest - _mlp_biases(model, tp) + experts.shared_gate * model.hidden,
        "copies": width * copies * model.hidden,
        "rows": width * rows * model.hidden,
        "routed_inner": width * rows * ffn,
        "summed": width * weighed * model.hidden,
        "wide_input": wide * own * model.hidden,
        "scores": wide * own * experts.count,
        "choices": (own * _INDEX * experts.top_k, *((own * wide * experts.top_k, own * wide) * experts.normalized)),
        "orders": (_INDEX * copies, _INDEX * copies, wide * copies, _INDEX * rows * away),
        "router": float(experts.count * model.hidden),
        "routed_up": experts.count * experts.ffn * model.hidden / (ep if away else tp),
        "shared": experts.shared_ffn > 0,
        "gate": (width * own * model.hidden * (1 + (tp > 1)) + width * own) * experts.shared_gate,
        "away": away,
        "nested": routed_weights(model, tp, ep, ranks) if away and zero >= 2 else None,
        "gathers": zero == 3,
        "reduces": reduces,
        "cut": cut_within(model, ep, shares),
        "alone": shares == 1,
    }


def _mlp_biases(model: Model, tp: int) -> float:
    ups = 2 if model.activation == "swiglu" else 1
    return model.mlp_bias * (model.ffn / tp * ups + model.hidden)
