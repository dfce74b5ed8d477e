"""How each training software uses memory. Constants belong to a family, never to a run; docs/memory.md says where each
comes from."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from shardwise.planner.memory.activations import Policy, Style
from shardwise.spec import Layout

GIB = 2**30

# What libraries ask of torch's allocator (cuBLAS workspaces), measured on an H200 beside a trace of the same step.
WORKSPACE = 0.065 * GIB


@dataclass(frozen=True)
class Family:
    """`eager` and `compiled`: what a block keeps. `selective`: what the word means there. `loss`: bytes per token and
    vocabulary entry at the loss's peak; `compiled_loss` where it is compiled too; `parallel_loss` where tensor
    parallelism divides the vocabulary.

    States: with `sharded_units`, weights are fp32 shards that are gathered unit by unit (FSDP) or fp32 replicas (DDP).
    Else every data rank has whole weights of `weight_bytes` and whole gradients, and shares out
    `state_bytes` of each (master weight, moments), with `copies_gradients` an fp32 copy of narrower gradients too.

    `copies_operands`: products in fp8 or fp4 make their operands from tensors that stay in the compute type, and drop
    them (torchao's Float8Linear); else that costs nothing.

    `slack`: reserved over live, (low, mid, high). `workspace`: of libraries, from the allocator. Outside the allocator:
    `context` of the process, `first_group` and `group` of the communicators.
    """

    name: str
    eager: Style
    compiled: Style
    selective: Policy = "selective"
    loss: float = 12.0
    compiled_loss: float = 12.0
    parallel_loss: float | None = None
    sharded_units: bool = True
    weight_bytes: float = 2.0
    state_bytes: float = 12.0
    copies_gradients: bool = False
    copies_operands: bool = False
    slack: tuple[float, float, float] = (1.02, 1.07, 1.2)
    workspace: float = WORKSPACE
    context: float = 0.7 * GIB
    first_group: float = 1.0 * GIB
    group: float = 0.25 * GIB

    def policy(self, layout: Layout) -> Policy:
        """Of a block that is recomputed at all."""
        if layout.recompute == "selective":
            return self.selective
        return "none" if layout.recompute == "none" else "full"

    def style(self, layout: Layout) -> Style:
        return self.compiled if layout.compile else self.eager

    def loss_bytes(self, layout: Layout) -> float:
        if layout.tp > 1 and self.parallel_loss is not None:
            return self.parallel_loss
        return self.compiled_loss if layout.compile else self.loss


_TORCH, _ENGINE = Style(), Style(fused=True, gathered=False)
_TITAN, _TITAN_COMPILED = Style(split_projections=True, repeats_kv=True), Style(fused=True, split_projections=True)
_OLD_SLACK = (1.05, 1.2, 1.45)

FAMILIES = {
    family.name: family
    for family in [
        Family("shardwise", Style(wide_router=True), Style(fused=True), parallel_loss=10.0, copies_operands=True),
        # With tensor parallelism: torch's loss_parallel.
        Family("torchtitan", _TITAN, _TITAN_COMPILED, selective="alternate", compiled_loss=6.0, parallel_loss=16.0),
        # Until the end of 2024 its loss was not compiled, and reserved memory stood further above live.
        Family(
            "torchtitan-2024",
            _TITAN,
            _TITAN,
            selective="alternate",
            parallel_loss=16.0,
            slack=_OLD_SLACK,
        ),
        Family("fsdp1", _TORCH, _TORCH, slack=_OLD_SLACK),
        Family("megatron", _ENGINE, _ENGINE, loss=10.0, compiled_loss=10.0, sharded_units=False),
        Family(
            "megatron-unfused",
            Style(fused=True, gathered=False, scores=True),
            _ENGINE,
            loss=10.0,
            sharded_units=False,
        ),
        Family(
            "deepspeed",
            Style(fused=True, dropout=True),
            Style(fused=True, dropout=True),
            loss=10.0,
            sharded_units=False,
            copies_gradients=True,
            slack=_OLD_SLACK,
            context=1.5 * GIB,
        ),
    ]
}


@functools.cache
def family_of(stack: str, *, cpu: bool) -> Family:
    """The family of a stack on its chips. On a CPU there is no CUDA and no caching allocator: a rank without a
    model has 0.31 GiB (benchmarks/cpu_figures.py), and the band is malloc's, modelled."""
    family = FAMILIES[stack]
    if not cpu:
        return family
    return replace(family, workspace=0.0, context=0.31 * GIB, first_group=0.0, group=0.0, slack=(1.0, 1.05, 1.25))
