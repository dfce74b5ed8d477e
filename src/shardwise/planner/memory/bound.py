"""A lower bound of the memory of many layouts at once, so that few of them need a whole prediction."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.planner.estimate import Array, Space
from shardwise.planner.memory.block_tape import backward_of
from shardwise.planner.memory.families import family_of
from shardwise.planner.memory.fit import outside_bytes
from shardwise.planner.memory.own_rank import has_own_moments, kind_of
from shardwise.planner.memory.predict import activation_width, kept_of_block
from shardwise.planner.memory.stages import chunks_of
from shardwise.planner.memory.states import states
from shardwise.planner.memory.tape import ACTIVATIONS
from shardwise.planner.memory.units import CHUNKS
from shardwise.planner.memory.weights import block_weights, position_weights, sharding, table_weights
from shardwise.planner.stacks import generation
from shardwise.planner.subject import Subject


def least_used(base: Subject, space: Space, *, loss: str, offload: str) -> Array:
    """Bytes that `predict_memory(…).used[0]` is never below, of shape (splits, sizes, recomputes, schedules).

    Three moments of own.py (compiled: of units.py) on the first pipeline rank, without their temporaries: the loss
    where this rank has it, a block's backward, and the update. Zeros for software that keeps whole weights (whole.py).
    """
    splits, model, layout = space.splits, base.model, space.splits[0]
    family = family_of(base.stack.name, cpu=generation(base.cluster.gpu) == "cpu")
    shape = (len(splits), len(space.sizes), len(space.recomputes), len(space.schedules))
    if not family.sharded_units:
        return np.zeros(shape)
    width = activation_width(base)
    wide, casts, pp = max(4, width), width < 4, layout.pp
    chunks = [
        chunks_of(base, layout.model_copy(update={"schedule": schedule, "virtual_stages": virtual}), 0)
        for schedule, virtual in space.schedules
    ]
    heads = np.array([len(here) * pp - 1 in here for here in chunks])
    own_head = heads & (not model.tied)

    # Weights. `whole` by schedule; shards by split and schedule; what they make by split, size, recompute and schedule.
    ranks = [sharding(split) for split in splits]
    table, positions = table_weights(model, layout.tp, 1), position_weights(model, 1)
    whole, shard = np.zeros(len(chunks)), np.zeros((len(splits), len(chunks)))
    smallest = np.inf
    kinds = {moe: np.array([_layers(here.values(), moe) for here in chunks]) for moe in (False, True)}
    kinds = {moe: count for moe, count in kinds.items() if count.any()}
    for moe, count in kinds.items():
        blocks = [block_weights(model, layout.tp, layout.ep, number, moe=moe) for number in ranks]
        smallest = min(smallest, blocks[0].whole)
        whole += blocks[0].whole * count
        shard += np.array([block.shard for block in blocks])[:, None] * count
    blocks_whole = whole
    whole = whole + table.whole * (1 + own_head) + positions.whole
    outer = [table_weights(model, layout.tp, number).shard for number in ranks]
    shard = shard + np.array(outer)[:, None] * (1 + own_head)
    shard += np.array([position_weights(model, number).shard for number in ranks])[:, None]
    zero = np.array([split.zero for split in splits])[:, None]
    parameters = wide * np.where(zero == 1, whole, shard) * (offload != "parameters")
    states = parameters + 2 * wide * shard * (offload not in ("optimizer", "parameters"))
    several = np.array([number > 1 for _, number in space.sizes])[:, None]
    alone = layout.tp * layout.pp * layout.ep == 1
    replicated = np.array([alone and split.zero < 2 and split.data_ranks * split.cp > 1 for split in splits])
    unsharded = (zero < 2)[:, None] | ((pp > 1) & several)
    gradients = 4 * np.where(unsharded, whole, shard[:, None] * (offload != "parameters"))
    # Before any activations.
    fullest = [
        [
            _fullest(schedule, pp, number, virtual) if allowed else ((), False)
            for (schedule, virtual), allowed in zip(space.schedules, row, strict=True)
        ]
        for (_, number), row in zip(space.sizes, space.allowed, strict=True)
    ]
    begun = np.array([[there for _, there in row] for row in fullest])
    before = gradients * (begun | replicated[:, None, None])  # already there when a backward starts
    computed = np.where(zero == 2, width * blocks_whole, (1 + (pp == 1)) * width * smallest)[:, None]
    cast = blocks_whole * np.array([name == "none" for name in space.recomputes])[:, None] + table.whole * heads
    computed = np.where(zero[:, None] < 2, width * cast * casts, computed)  # by split, recompute and schedule

    # Activations, by size, recompute and schedule.
    in_flight = [
        [dict(zip(here, counts, strict=False)) for here, (counts, _) in zip(chunks, row, strict=True)]
        for row in fullest
    ]
    tokens = np.array([size for size, _ in space.sizes])[:, None, None] * base.sequence / layout.cp
    kept = np.zeros(shape[1:])
    again = np.full(len(space.recomputes), np.inf)
    for moe in kinds:
        layers = np.array(
            [
                [
                    sum(count * _layers([here[stage]], moe) for stage, count in now.items())
                    for now, here in zip(row, chunks, strict=True)
                ]
                for row in in_flight
            ]
        )[:, None]
        per_token = [
            _kept_per_token(replace(base, layout=layout.model_copy(update={"recompute": recompute})), moe=moe)
            for recompute in space.recomputes
        ]
        some = np.array([after for _, after in per_token])[None, :, None]
        again = np.minimum(again, [max(0.0, none - after) for none, after in per_token])
        if offload != "activations":
            kept += tokens * some * layers
    backward = kept + tokens * again[None, :, None]
    loss_at = family.loss_bytes(layout) * tokens * model.vocabulary / layout.tp / (CHUNKS if loss == "chunked" else 1)
    at_loss = kept + loss_at * (pp == 1)

    live = states[:, None, None] + np.maximum(
        gradients[:, :, None],
        before[:, :, None] + np.maximum(computed[:, None] + backward, at_loss),
    )
    beside = np.array([sum(outside_bytes(split, family)) for split in splits])[:, None, None, None]
    result: Array = family.slack[0] * live + beside
    return result


@functools.lru_cache(maxsize=65536)
def _fullest(schedule: str, pipeline: int, micro_batches: int, virtual: int) -> tuple[tuple[int, ...], bool]:
    """Micro-batches that the first rank holds, by stage, in the backward where they are most; and whether gradients are
    there."""
    backward = [
        state
        for state in states(schedule, pipeline, micro_batches, virtual, 0, gathers=False)
        if state.kind == "B" or state.kind == ("I" if state.place else "W")
    ]
    most = max(backward, key=lambda state: (sum(state.held), all(state.begun)))
    return most.held, all(most.begun)


def _kept_per_token(subject: Subject, *, moe: bool) -> tuple[float, float]:
    """Bytes that one block keeps without recompute, and with the layout's."""
    if not has_own_moments(subject):
        return kept_of_block(subject, 1.0, moe=moe)
    one = replace(subject, layout=subject.layout.model_copy(update={"micro_batch": 1}))
    block, policy = kind_of(one, moe=moe).block, subject.layout.recompute
    none, some = (backward_of(block, name, "sharded", False).kept[ACTIVATIONS] for name in ("none", policy))
    tokens = subject.sequence / subject.layout.cp
    return none / tokens, some / tokens


def _layers(chunks: Any, moe: bool) -> int:
    return sum(chunk.moe if moe else chunk.dense for chunk in chunks)
