"""What comes and goes while a dense block's backward runs, in the order of `model/block.py`, `parallel/tensor.py` and
autograd. Where the block is recomputed, its forward runs first; what that makes counts as transient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardwise.planner.memory.attention_tape import AttentionTape
from shardwise.planner.memory.saved_tape import Gradient
from shardwise.planner.memory.tape import ACTIVATIONS, GATHERED, GRADIENTS, Parts
from shardwise.spec import Model


@dataclass(frozen=True)
class Block:
    """Sizes of one dense block on one rank: bytes of a micro-batch's tensors, elements of weights."""

    width: int  # bytes of an activation
    stream: float  # the residual stream on this rank
    whole: float  # the same of all tensor-parallel ranks
    query: float
    key: float  # or value
    inner: float
    statistics: float  # of one norm
    sums: float  # log-sum-exp of the attention's scores
    qkv: float  # elements of each product's weight
    out: float
    up: float
    down: float
    rest: float  # of norms and biases
    gated: bool
    rope: bool
    qk_norm: float
    grouped: bool
    own_qkv: float  # elements of the rows of qkv that are computed here
    selected: bool  # fewer KV heads than tensor-parallel ranks: the rows that are computed are copied
    parallel: bool  # tensor
    casts: bool  # products cast their weights, and keep the copies
    context: str  # "", allgather, ring, ulysses
    parts: int  # context-parallel ranks

    def tape(self, policy: str, gradient: Gradient, offloaded: bool) -> BlockTape:
        return BlockTape(self, policy, gradient, offloaded)

    def within(self, before: float, ahead: float, *, there: bool, stays: bool) -> tuple[Block, float, float]:
        """This block where FSDP2 reduces `before` bytes of the unit after it, and gathers `ahead` bytes of the one
        before it; with what of these its tape does not know of. there: its weights are gathered already; stays: they
        are not given up."""
        return self, before, ahead

    @property
    def largest(self) -> float:
        """Elements of the largest product's weight."""
        return max(self.qkv, self.out, self.up, self.down)

    @property
    def rows_cut(self) -> float:
        """Elements of weights whose rows tensor parallelism cuts."""
        return self.qkv * (not self.selected) + self.up * (2 if self.gated else 1)

    @property
    def weights(self) -> float:
        return self.qkv + self.out + self.up * (2 if self.gated else 1) + self.down + self.rest


@functools.lru_cache(maxsize=65536)
def block_of(
    model: Model, tp: int, cp: int, method: str, sequences: float, sequence: int, width: int, casts: bool
) -> Block:
    """sequences: of a micro-batch. casts: weights are wider than activations, and nobody gathers them."""
    tokens = sequences * sequence / cp
    keys = max(1.0, model.kv_heads / tp)
    rows = (model.heads + 2 * model.kv_heads) * model.head_dim
    selected = model.kv_heads % tp > 0
    gated = model.activation == "swiglu"
    norms = 2 * model.hidden * (2 if model.norm_bias else 1)
    held = rows / (1 if selected else tp)
    biases = held * model.qkv_bias + model.hidden * model.out_bias
    biases += model.mlp_bias * (model.ffn / tp * (2 if gated else 1) + model.hidden)
    return Block(
        width=width,
        stream=width * tokens * model.hidden / tp,
        whole=width * tokens * model.hidden,
        query=width * tokens * model.heads / tp * model.head_dim,
        key=width * tokens * keys * model.head_dim,
        inner=width * tokens * model.ffn / tp,
        statistics=(8 if model.norm == "layernorm" else 4) * tokens / tp,
        sums=4 * tokens * model.heads / tp,
        qkv=held * model.hidden,
        out=model.heads * model.head_dim / tp * model.hidden,
        up=model.ffn / tp * model.hidden,
        down=model.ffn / tp * model.hidden,
        rest=norms + biases + 2 * model.head_dim * model.qk_norm,
        gated=gated,
        rope=model.positions == "rope",
        qk_norm=(4 * (model.heads + model.kv_heads) / tp * tokens) if model.qk_norm else 0.0,
        grouped=model.heads > model.kv_heads,
        own_qkv=(model.heads / tp + 2 * keys) * model.head_dim * model.hidden,
        selected=selected,
        parallel=tp > 1,
        casts=casts,
        context=method if cp > 1 else "",
        parts=cp,
    )


@dataclass(frozen=True)
class Backward:
    """`moments` relative to what was there before the block's backward without anything of this block; `kept`: what its
    forward left, which is in them; `after`: what its backward leaves (gradients)."""

    moments: tuple[tuple[str, Parts], ...]
    kept: Parts
    after: Parts

    @functools.cached_property
    def top(self) -> tuple[str, Parts]:
        return max(self.moments, key=lambda moment: sum(moment[1]))


@functools.lru_cache(maxsize=65536)
def backward_of(block: Block, policy: str, gradient: Gradient, offloaded: bool, segment: int = 1) -> Backward:
    """policy: none, selective or full. segment: blocks that are made again together, of which this is the last."""
    tape = block.tape(policy, gradient, offloaded)
    tape.keep()
    kept = tape.parts
    if segment > 1:
        others = backward_of(block, "none", gradient, False).kept
        tape.make("blocks before it", (segment - 1) * others[ACTIVATIONS])
        tape.make("their casts", (segment - 1) * others[GATHERED], GATHERED)
    tape.backward()
    tape.drop("blocks before it", "their casts")
    return Backward(tuple(tape.moments), kept, tape.parts)


class BlockTape(AttentionTape):
    def again(self) -> None:
        self.fetch("block input")
        self._save("attention_norm")
        self._attention_again()
        self._save("mlp_norm")
        self._mlp_again()

    def _mlp_again(self) -> None:
        b = self.b
        if b.parallel:
            self.make("norm", b.stream)
            self._gather("mlp input")
        else:
            self._save("mlp input")
        self._inner_again()
        self.drop("norm")
        self._cast("down", b.down)

    def _inner_again(self) -> None:
        """From the MLP's input to what its last product takes."""
        b = self.b
        if b.gated:
            self._cast("gate", b.up)
            self._save("gate")
            self._save("silu")
        self._cast("up", b.up)
        self._save("up")
        self._save("product")

    def backward(self) -> None:
        b = self.b
        self.make("gradient", b.stream)
        self._mlp_backward()
        self.fetch("attention.out")
        self.make("by norm", b.stream)
        self._done("by mlp input", "input by up", "mlp_norm", "attention.out")
        self.make("residual", b.stream)
        self._done("gradient")
        self.drop("by norm")
        self._attention_backward()
        self.fetch("block input")
        self.make("by norm", b.stream)
        self._done("by input")
        if self.gradient != "later":
            self.drop("block input", "attention_norm")
        self.make("sum", b.stream)
        self._done("residual")
        self.drop("by norm", "rounds", "product of down", "scattered down")
        if self.gradient != "later":
            kept = b.width if self.gradient == "sharded" else max(4, b.width) * (self.gradient == "first")
            self.make("gradients of the rest", kept * b.rest, GATHERED if self.gradient == "sharded" else GRADIENTS)
            if self.gradient == "moved":
                self.now[GRADIENTS] -= max(4, b.width) * b.rest
        self.drop("sum")

    def _mlp_backward(self) -> None:
        self._whole_gradient()
        if self.policy != "none":
            self.again()
        self._mlp_products()

    def _mlp_products(self) -> None:
        b = self.b
        whole = b.whole if b.parallel else b.stream
        # down
        self.fetch("product")
        self._product_backward("down", b.down, "by product", b.inner, done=["product", "whole gradient"])
        # up and gate, or up alone
        if b.gated:
            self.fetch("silu", "up")
            self.make("by silu", b.inner)
            self.make("by up", b.inner)
            self.drop("silu", "up", "by product")
        else:
            self.fetch("up")
            self.make("by up", b.inner)
            self.drop("by product", "up")
        self.fetch("mlp input")
        self._product_backward("up", b.up, "input by up", whole, done=["by up"])
        if b.gated:
            self.fetch("gate")
            self.make("by gate", b.inner)
            self.drop("by silu", "gate")
            self._weight("gate", b.up)
            self.make("input by gate", whole)
            self._done("mlp input", "by gate")
            self.make("by mlp input", whole)
            self.drop("input by up", "input by gate")
            self._weight_done("gate", b.up)
        else:
            self._done("mlp input")
        self._scatter("by mlp input", "input by up")
