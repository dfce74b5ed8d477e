"""Choices of a Layout that do not go together, each with its reason and what would. docs/layouts.md is the table."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec.layout import Layout
from shardwise.spec.model import Model

FOLDED = ("zbv", "dualpipev")  # a rank has one stage from the front and one from the back
SPLIT_BACKWARD = ("interleaved-zb", "zbv", "dualpipev")


def conflicts(model: Model, layout: Layout) -> Iterator[str]:
    """Every pair of choices that cannot be trained together."""
    if layout.compile and model.experts and model.experts.capacity_factor:
        yield (
            "model.experts.capacity_factor makes the number of tokens of a block depend on the data, which then cannot "
            "be compiled whole; what works: compile: false, or no capacity_factor"
        )
    if layout.compile and layout.cp > 1 and layout.cp_method == "ring":
        yield (
            "layout.cp_method ring sends and receives in the middle of a block, which then cannot be compiled whole; "
            "what works: cp_method: allgather, or compile: false"
        )
    if layout.compile and layout.ep > 1:
        yield (
            f"layout.compile does not go with ep {layout.ep}: how many tokens go to which rank is known only as they "
            "go; nearest: compile: false"
        )
    if layout.recompute == "selective" and layout.ep > 1 and layout.zero >= 2:
        yield (
            f"layout.recompute selective does not go with ep {layout.ep} and zero {layout.zero}: it would repeat only "
            "parts of how FSDP2 gathers experts within a block; nearest: recompute: full"
        )
    yield from _offload(layout, model)
    if layout.async_tp and not (layout.compile and layout.tp > 1):
        yield (
            f"layout.async_tp is the compiler's work on tensor-parallel products, and needs compile: true and tp of at "
            f"least 2, not {layout.tp}; nearest: async_tp: false"
        )
    yield from _pipeline(layout, model)


def _offload(layout: Layout, model: Model) -> Iterator[str]:
    """Offload belongs to whoever holds what is offloaded."""
    if layout.offload == "parameters" and layout.zero < 2:
        yield (
            f"layout.offload parameters offloads the shards of FSDP2, and zero is {layout.zero}; nearest: zero: 3, or "
            "offload: optimizer"
        )
    if layout.offload == "parameters" and layout.pp > 1 and model.tied:
        yield (
            f"layout.offload parameters with pp {layout.pp} would sum the gradient of {model.name}'s tied table on the "
            "host, which this version does not do; nearest: offload: optimizer"
        )
    if layout.offload == "activations" and layout.recompute == "selective":
        yield (
            "layout.offload activations does not reach what recompute selective keeps; nearest: recompute: full, or "
            "offload: none"
        )


def _pipeline(layout: Layout, model: Model) -> Iterator[str]:
    """What PyTorch's schedules, and the trainer on them, do not do."""
    if layout.pp == 1:
        return
    if layout.compile and layout.schedule in SPLIT_BACKWARD:
        yield (
            f"layout.compile does not go with layout.schedule {layout.schedule}: a compiled block cannot compute the "
            "gradients of inputs and weights apart; what works: compile: false, or schedule 1f1b or interleaved"
        )
    if layout.zero == 3 and layout.schedule in SPLIT_BACKWARD:
        yield (
            f"layout.zero 3 gives weights up between forward and backward, but layout.schedule {layout.schedule} must "
            "find them there, as it computes their gradients later than those of inputs; what works: zero: 2"
        )
    if layout.recompute != "none" and layout.schedule in SPLIT_BACKWARD:
        yield (
            f"layout.recompute {layout.recompute} does not go with layout.schedule {layout.schedule}, which goes "
            "through a block backwards for the gradients of inputs and again for those of each weight, and would make "
            "it anew every time; what works: recompute: none, or schedule: 1f1b or interleaved"
        )
    if layout.offload == "activations" and layout.schedule in SPLIT_BACKWARD:
        yield (
            f"layout.offload activations does not go with layout.schedule {layout.schedule}: what the backward of "
            "inputs alone has brought back is never let go of, and memory grows from step to step; what works: "
            "offload: none, or schedule: 1f1b or interleaved"
        )
    if model.tied and layout.schedule in FOLDED:
        yield (
            f"layout.schedule {layout.schedule} has the first and the last stage on one rank, which would hold the "
            f"tied table of {model.name} twice; what works: schedule 1f1b, interleaved or interleaved-zb"
        )
