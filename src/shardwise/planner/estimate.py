"""Estimates: the seconds of many steps at once, for ranking them.

As `planner/step.py`, but with closed-form bubbles, and with layers that all cost as much as the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.planner.pieces import Pieces
from shardwise.planner.recompute import recompute_of
from shardwise.planner.schedules import stages_of
from shardwise.planner.stacks import Stack
from shardwise.planner.stages import cut_of
from shardwise.planner.step import StepModel
from shardwise.planner.subject import Subject
from shardwise.spec import Layout

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Space:
    """Layouts of one tp, cp, pp and ep: each of `splits` (of the data ranks, with a ZeRO stage) with each size
    (micro-batch, micro-batches a step), each recompute policy and each schedule (name, virtual stages).

    `allowed[size][schedule]`: whether the schedule can do so many micro-batches. Arrays over it have the shape (splits,
    sizes, recomputes, schedules).
    """

    splits: tuple[Layout, ...]
    sizes: tuple[tuple[int, int], ...]
    recomputes: tuple[str, ...]
    schedules: tuple[tuple[str, int], ...]
    allowed: tuple[tuple[bool, ...], ...]


class Estimates:
    """Seconds of a step over one Space. base: any subject of the same model, cluster, stack and sequence."""

    def __init__(self, steps: StepModel, base: Subject, space: Space):
        self._steps, self._base, self._space = steps, base, space
        stack, ranks = base.stack, space.splits[0].pp
        sizes = [[self._pieces(0, size, again) for again in space.recomputes] for size in range(len(space.sizes))]
        splits = [self._pieces(split, 0, space.recomputes[0]) for split in range(len(space.splits))]
        gathers = _column([item.data.gather_forward for item in splits])
        returns = _column([item.data.gather_backward + item.data.reduce for item in splits])
        forward = np.array([[item.layers[1].forward for item in row] for row in sizes])
        backward = np.array([[item.layers[1].backward for item in row] for row in sizes])
        # Sizes are those of the first split, whose weights may be held in another way.
        held = [item.layers[1] for item in splits]
        forward = forward + _column([item.forward - held[0].forward for item in held])
        backward = backward + _column([item.backward - held[0].backward for item in held])
        self._each = _beside(forward, gathers, stack) + _beside(backward, returns, stack)
        hides = 1 - stack.hides_data * (1 - stack.slowdown)
        self._once = np.array([item.data.once * hides for item in splits]) + stack.step_overhead_seconds
        self._count = np.array([number for _, number in space.sizes])[:, None, None]
        self._fullest = np.array([_fullest(base, ranks, *schedule) for schedule in space.schedules]).T
        self._bubbles = (ranks - 1) * np.array([bubble_share(*schedule) for schedule in space.schedules])
        self._heads = {"full": np.array([_ends(row[0]) for row in sizes])}
        self._offloads = {"none": (np.zeros(1), np.array([item.optimizer for item in splits]))}

    def seconds(self, loss: str, offload: str) -> Array:
        """Of shape (splits, sizes, recomputes, schedules)."""
        ranks, layers = self._space.splits[0].pp, self._base.model.layers
        copies, after = self._offload(offload)
        each, head = (self._each + copies)[..., None], self._head(loss)[:, None, None]
        whole = (layers * each + head) / ranks
        fullest, last = self._fullest
        busy = self._count * np.maximum(np.maximum(fullest * each, last * each + head), whole)
        result: Array = busy + whole * self._bubbles + (self._once + after)[:, None, None, None]
        return result

    def _pieces(self, split: int, size: int, recompute: str, **changes: str) -> Pieces:
        space = self._space
        micro_batch, count = space.sizes[size]
        changes = {**changes, "recompute": recompute}
        layout = space.splits[split].model_copy(update={**changes, "micro_batch": micro_batch})
        subject = replace(self._base, layout=layout, micro_batches=count, recompute=recompute_of(recompute))
        return self._steps.pieces(subject)

    def _head(self, loss: str) -> Array:
        if loss not in self._heads:
            sizes, plain = range(len(self._space.sizes)), self._space.recomputes[0]
            self._heads[loss] = np.array([_ends(self._pieces(0, size, plain, loss=loss)) for size in sizes])
        return self._heads[loss]

    def _offload(self, offload: str) -> tuple[Array, Array]:
        """Seconds of copies of one layer and micro-batch, and seconds once a step, the optimizer's included."""
        if offload not in self._offloads:
            space, plain = self._space, self._space.recomputes[0]
            if offload == "activations":
                of_sizes = [
                    [self._pieces(0, size, again, offload=offload).copies[1].both for again in space.recomputes]
                    for size in range(len(space.sizes))
                ]
                self._offloads[offload] = np.array(of_sizes), self._offloads["none"][1]
            else:
                of_splits = [self._pieces(split, 0, plain, offload=offload) for split in range(len(space.splits))]
                copies = _column([item.copies[1].both for item in of_splits])
                self._offloads[offload] = copies, np.array([item.copied_once + item.optimizer for item in of_splits])
        return self._offloads[offload]


def bubble_share(schedule: str, virtual: int) -> float:
    """The bubble over that of 1F1B, whose ranks each wait for (p - 1) micro-batches."""
    shares = {"interleaved": 1 / virtual, "interleaved-zb": 0.5 / virtual, "zbv": 0.15, "dualpipev": 0.3}
    return shares.get(schedule, 1.0)


def _fullest(base: Subject, ranks: int, schedule: str, virtual: int) -> tuple[int, int]:
    """Layers of the fullest rank, and of the one with the head."""
    cut = cut_of(base, ranks * virtual)
    held = [stages_of(schedule, ranks, virtual, rank) if ranks > 1 else [0] for rank in range(ranks)]
    layers = [sum(len(cut[stage]) for stage in stages) for stages in held]
    return max(layers), next(count for count, stages in zip(layers, held, strict=True) if len(cut) - 1 in stages)


def _ends(pieces: Pieces) -> float:
    """Head and embedding, forward and backward."""
    return sum(pieces.head) + sum(pieces.embedding)


def _column(values: Sequence[float]) -> Array:
    """One value per split, to go with sizes and recompute policies."""
    return np.array(values)[:, None, None]


def _beside(compute: Array, communication: Array, stack: Stack) -> Array:
    """`beside` of planner/step.py."""
    hidden = communication * stack.hides_data
    exposed = communication - hidden
    result: Array = np.maximum(compute + stack.slowdown * np.minimum(hidden, compute), hidden) + exposed
    return result
