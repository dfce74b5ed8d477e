"""What comes and goes while the backward of a block with experts runs, in the order of `model/experts.py`,
`parallel/expert.py` and autograd; the rest of the block is as in `block_tape.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from shardwise.planner.memory.block_tape import BlockTape
from shardwise.planner.memory.experts_sizes import ExpertsSizes, sizes_with_experts
from shardwise.planner.memory.latent_tape import LatentAttention
from shardwise.planner.memory.saved_tape import Gradient
from shardwise.planner.memory.tape import GATHERED, GRADIENTS


@dataclass(frozen=True)
class ExpertsBlock(ExpertsSizes):
    """A block with experts."""

    def tape(self, policy: str, gradient: Gradient, offloaded: bool) -> BlockTape:
        tape = _LatentExpertsTape if self.latent else _ExpertsTape
        return tape(self, policy, gradient, offloaded)


class _ExpertsTape(BlockTape):
    b: ExpertsSizes

    def _saved(self) -> list[tuple[str, float, bool]]:
        b = self.b
        shared = ("mlp input", "gate", "silu", "up", "product")
        rest = super()._saved()
        gates = [("routed gate", b.routed_inner, True), ("routed silu", b.routed_inner, False)] if b.gated else []
        return [
            *[item for item in rest if item[0] not in shared],
            ("router input", b.wide_input * (b.width < 4 or b.parallel or not b.shared), False),
            ("scores", b.scores, True),
            *[(f"choice {number}", size, False) for number, size in enumerate(b.choices)],
            *[(f"order {number}", size, False) for number, size in enumerate(b.orders)],
            *[item for item in rest if b.shared and item[0] in shared],
            ("shared gate", b.gate, False),
            ("dispatched", b.rows, False),
            ("routed up", b.routed_inner, True),
            *gates,
            ("routed product", b.routed_inner, False),
            ("results", b.rows * b.away, True),  # index_copy keeps its source
            ("returned", b.copies, True),
        ]

    @property
    def _choices(self) -> list[str]:
        return [f"choice {number}" for number in range(len(self.b.choices))]

    @property
    def _orders(self) -> list[str]:
        return [f"order {number}" for number in range(len(self.b.orders))]

    def _kept_products(self) -> list[tuple[str, float, float]]:
        b = self.b
        whole, parallel = b.whole if b.parallel else b.stream, b.parallel
        found = [("out", whole, b.stream * parallel)]
        if b.shared:
            found += [("down", whole, b.stream * parallel)]
        if b.away:
            found += [("dispatch", b.rows, 0.0)]
        elif parallel:
            found += [("sum over ranks", 0.0, b.stream)]
        return found

    def _weights(self) -> list[tuple[str, float]]:
        b = self.b
        shared = [item for item in super()._weights() if b.shared or item[0] in ("qkv", "out")]
        return [*shared, *((f"routed {name}", b.routed_up) for name in self._matrices())]

    def _matrices(self) -> tuple[str, ...]:
        return ("gate", "up", "down") if self.b.gated else ("up", "down")

    def _cast(self, name: str, elements: float) -> None:
        super()._cast(name, elements)
        if name == "out":  # the router's, always
            self.make("cast router", 4.0 * self.b.router, GATHERED)

    # The forward, again.

    def _mlp_again(self) -> None:
        b = self.b
        self.make("norm", b.stream)
        self._save("router input")
        self._save("scores")
        for name in (*self._choices, *self._orders):
            self._save(name)
        if b.parallel and not b.away:
            self.make("gathered", b.whole)
        if b.away:
            self.make("sent", b.copies)
            if self.policy != "selective":
                self.make("product of dispatch", b.rows)
            self.drop("sent")
        else:
            self._save("dispatched")
        self.drop("gathered")
        if b.shared:
            self._shared_again()
        if b.away:
            self._save("dispatched")
        self._unshard_experts()
        for name in self._matrices():
            self._cast(f"routed {name}", b.routed_up)
        self._save("routed up")
        if b.gated:
            self._save("routed gate")
            self._save("routed silu")
        self._save("routed product")
        if b.away:
            self._save("results")
            self.make("empty", b.rows)
            self.make("unsorted", b.rows)
            self.drop("empty")
            self._save("returned")
            self.drop("unsorted")
        else:
            self._save("returned")
        wide = b.copies * (4 / b.width if b.width < 4 else 1)
        self.make("weighed", wide)
        self.make("in order", wide)
        # There it stops: all that is needed has been made.
        self.drop("weighed", "in order", "norm", "shared", "product of down", "scattered down")
        if self.policy != "selective":
            self.drop("product of dispatch")

    def _shared_again(self) -> None:
        b = self.b
        if b.parallel:
            self._gather("mlp input")
        elif self.policy != "none" and not self._stays("mlp input", False):
            self.rename("norm", "mlp input")
        self._inner_again()
        self._cast("down", b.down)
        if self.policy == "selective":
            return
        self._product("down")
        if b.parallel:
            self.rename("scattered down", "shared")
        else:
            self.rename("product of down", "shared")
        self._save("shared gate")

    # The backward.

    def backward(self) -> None:
        super().backward()
        self.drop("scattered sum over ranks")

    def _mlp_backward(self) -> None:
        b = self.b
        wide = b.copies * (4 / b.width if b.width < 4 else 1)
        self._begin_experts()
        if b.parallel and not b.away:
            self._whole_gradient()
        if b.width < 4:
            self.make("wide gradient", b.summed * 4 / b.width)
            self.drop("whole gradient")
        self.make("by order", wide)
        self.drop("wide gradient", "whole gradient")
        if self.policy != "none":
            self.again()
        self.fetch(*self._orders, "returned")
        self.make("by weighed", wide)
        self.drop("by order")
        self.make("by copies", wide)
        self.make("by weights", wide)
        if self.policy != "none" or self.offloaded:  # what was made again, or fetched, ends with the product
            self.drop("returned")
        if b.width < 4:
            self.make("by returned", b.copies)
            self.drop("by copies")
        else:
            self.rename("by copies", "by returned")
        self.drop("by weights", "by weighed", "returned")
        if b.away:
            self.make("sent back", b.rows)
            self.drop("by returned")
            self.fetch("results")
            self.make("by returned", b.rows)
            self.drop("sent back", "results")
        self._experts_backward()
        if b.away:
            self.make("by arrived", b.rows)
            self.drop("by rows")
        if b.shared:
            self._shared_backward()
        if b.away:
            self.make("by rows", b.copies)
            self.drop("by arrived", "product of dispatch")
        self.make("by places", b.copies)
        self.make("by experts", b.summed)
        self.drop("by places", "by rows")
        if b.parallel and not b.away:
            self._scatter("by experts")
        if b.shared:
            self.make("so far", b.stream)
            self.drop("by experts", "by mlp input", "input by up")
            self.rename("so far", "by experts")
        self.fetch("scores", *self._choices, "router input")
        self.make("by router, wide", b.wide_input)
        self._done("router input", "scores", *self._choices, *self._orders)
        self.drop("cast router")
        self.make("by router", b.stream)
        self.drop("by router, wide")
        self.make("by mlp input", b.stream)
        self.drop("by experts", "by router")
        self._router_gradient()

    def _router_gradient(self) -> None:
        b = self.b
        if self.gradient == "sharded":
            self.make("gradient of router", b.width * b.router, GATHERED)
        elif self.gradient == "first":
            self.make("gradient of router", max(4, b.width) * b.router, GRADIENTS)
        elif self.gradient == "moved":
            self.now[GRADIENTS] -= max(4, b.width) * b.router

    def _experts_backward(self) -> None:
        """Of the gradient of the experts' results, "by returned", to that of their rows, "by rows"."""
        b = self.b
        self._gather_experts()
        self.fetch("routed product", "routed up", "routed gate", "routed silu", "dispatched")
        self._weight("routed down", b.routed_up)
        self.make("by product", b.routed_inner)
        self.drop("by returned")
        self._done("routed product")
        self._weight_done("routed down", b.routed_up)
        if b.gated:
            self.make("by silu", b.routed_inner)
            self.make("by up", b.routed_inner)
            self.drop("by product", "routed up", "routed silu")
            self.make("by gate", b.routed_inner)
            self.drop("by silu", "routed gate")
            self._product_backward("routed gate", b.routed_up, "by gate's product", b.rows, done=["by gate"])
        else:
            self.make("by up", b.routed_inner)
            self.drop("by product", "routed up")
        self._product_backward("routed up", b.routed_up, "by rows", b.rows, done=["by up"])
        self._done("dispatched")
        if b.gated:
            self.make("sum of rows", b.rows)
            self.drop("by rows", "by gate's product")
            self.rename("sum of rows", "by rows")
        self._reduce_experts()

    def _shared_backward(self) -> None:
        self._whole_gradient()
        self.fetch("shared gate")
        self._mlp_products()
        self._done("shared gate")

    # FSDP2's unit of the routed experts. Its weights are gathered when the block's backward begins, unless there is
    # nobody to gather them from; those of the unit before the block when the experts' begins, in the end of which the
    # reduction of the unit after the block is over.

    def _begin_experts(self) -> None:
        b = self.b
        self.make("reduction before", b.before, GATHERED)
        if b.nested and b.gathers and not b.alone:
            self.make("experts", b.width * b.nested.padded, GATHERED)

    def _unshard_experts(self) -> None:
        """Through the collective's buffer; experts that are cut, through another copy, too."""
        b = self.b
        if b.nested and b.gathers:
            if b.alone:
                self.make("experts", b.width * b.nested.padded, GATHERED)
            self.make(
                "experts' buffer", b.width * (b.routed_up if b.alone else (1 + b.cut) * b.nested.padded), GATHERED
            )
            self.drop("experts' buffer")

    def _gather_experts(self) -> None:
        if self.policy == "none":  # else a recomputation has done it
            self._unshard_experts()
        self.make("unit before", self.b.ahead, GATHERED)

    def _reduce_experts(self) -> None:
        b = self.b
        if not b.nested or not b.reduces:
            return
        whole, shard = b.nested.padded, b.nested.shard
        self.drop("experts", "reduction before")
        if not b.gathers and not b.stays:
            self.make("experts given up", -b.width * whole, GATHERED)
        self.make("in order of ranks", b.width * b.routed_up * b.cut, GATHERED)
        self.make("experts' reduction", 4 * whole, GATHERED)
        self.drop("in order of ranks", *(f"gradient of routed {name}" for name in self._matrices()))
        self.make("experts' gradients", 4 * shard, GRADIENTS)
        self.make("divided", 4 * whole * b.alone, GATHERED)
        self.drop("divided")


class _LatentExpertsTape(_ExpertsTape, LatentAttention):
    """Both."""


@functools.lru_cache(maxsize=65536)
def experts_block(*arguments: Any, **named: Any) -> ExpertsBlock:
    """As `sizes_with_experts`."""
    return ExpertsBlock(**sizes_with_experts(*arguments, **named))
