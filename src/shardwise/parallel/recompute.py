"""Recompute: what a block's backward needs is made again instead of kept (activation checkpointing, arXiv 1604.06174).

What it saves and costs: with `full` a block keeps its input alone and its forward runs twice, communication included;
`selective` keeps the results of products, of attention and of collectives, so that only cheap elementwise work is done
again; `every:K` does `full` in every K-th block; `sqrt` keeps the input of each ⌈√n⌉ blocks, and makes all of them
again at once. planner/recompute.py says which blocks these are, for the planner too.

Nothing in a block draws random numbers, so no generator's state is kept.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.model.block import Block
from shardwise.model.cache import Cache
from shardwise.model.decoder import Decoder
from shardwise.parallel.place import become
from shardwise.planner.recompute import recompute_of
from shardwise.spec import Layout

_aten, _collective = torch.ops.aten, torch.ops._c10d_functional
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    torch.ops.shardwise.one_by_one.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _collective.reduce_scatter_tensor.default,
    _collective.all_to_all_single.default,
}


def recompute(decoder: Decoder, layout: Layout) -> None:
    """Make a decoder, or a stage of it, repeat what the layout says, in place."""
    policy = recompute_of(layout.recompute)
    blocks = list(decoder.blocks.values())
    segments = policy.segments(len(blocks))
    if policy.kind == "sqrt":
        bounds = [segment.start for segment in segments] + [len(blocks)]
        become(decoder, _Segmented, bounds=bounds)
        return
    for segment in segments:
        for index in segment:
            become(blocks[index], _Selective if policy.kind == "selective" else _Full)


class _Full(Block):
    def forward(self, *arguments: Any) -> Tensor:
        return _repeat(super().forward, *arguments)


class _Selective(Block):
    def forward(self, *arguments: Any) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep)
        return _repeat(super().forward, *arguments, context_fn=contexts)


class _Segmented(Decoder):
    bounds: list[int]

    def run_blocks(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            return super().run_blocks(x, rope, cache)
        blocks = list(self.blocks.values())

        def segment(x: Tensor, first: int, end: int) -> Tensor:
            for block in blocks[first:end]:
                x = block(x, rope)
            return x

        for first, end in pairwise(self.bounds):
            x = _repeat(segment, x, first, end)
        return x


_repeat = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _keep(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
