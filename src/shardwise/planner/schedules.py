"""Pipeline schedules: which rank computes what in which order. Tests hold them equal to PyTorch's own tables.

A rank's program is written as the order of (stage, kind); the micro-batch of each action follows by counting, since
every stage takes its micro-batches in order.

Kinds: F forward, B whole backward, I gradient of the input alone, W gradient of the weights alone.
Sources: GPipe arXiv 1811.06965; 1F1B arXiv 2006.09503; interleaved arXiv 2104.04473; zero bubble arXiv 2401.10241;
ZBV arXiv 2405.15362 (sail-sg/zero-bubble); DualPipeV (deepseek-ai/DualPipe, "cut in half").
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardwise.spec.combinations import FOLDED

Program = Iterator[tuple[int, str]]


class Action(NamedTuple):
    """One computation of one micro-batch on one stage."""

    stage: int
    kind: str
    micro_batch: int


def stages_of(schedule: str, pipeline: int, virtual: int, rank: int) -> list[int]:
    """The stages that a rank holds, first to last: in a loop, or folded into a V (zbv, dualpipev)."""
    if schedule in FOLDED:
        return [rank, 2 * pipeline - 1 - rank]
    return [chunk * pipeline + rank for chunk in range(virtual)]


def steady_micro_batches(schedule: str, pipeline: int, micro_batches: int) -> int:
    """As many as show all that happens: a long run is a short one of three rounds and a steady state."""
    few = min(micro_batches, max(3 * pipeline, 2 * pipeline + 2))
    if schedule.startswith("interleaved"):
        few = min(micro_batches, max(pipeline, few // pipeline * pipeline))
    return few


def order(schedule: str, pipeline: int, micro_batches: int, virtual: int = 1) -> list[list[Action]]:
    """The actions of every rank in the order in which they run; rank r is at index r.

    Raises ValueError for a number of micro-batches that the schedule cannot do (`spec/legality.py` says it first).
    """
    return [rank_order(schedule, pipeline, micro_batches, virtual, rank) for rank in range(pipeline)]


def rank_order(schedule: str, pipeline: int, micro_batches: int, virtual: int, rank: int) -> list[Action]:
    """`order` of one rank alone."""
    return list(_rank_order(schedule, pipeline, micro_batches, virtual, rank))


@functools.lru_cache(maxsize=4096)
def _rank_order(schedule: str, pipeline: int, micro_batches: int, virtual: int, rank: int) -> tuple[Action, ...]:
    stages = stages_of(schedule, pipeline, virtual, rank)
    programs: dict[str, Callable[[], Program]] = {
        "gpipe": lambda: _gpipe(stages[0], micro_batches),
        "1f1b": lambda: _one_forward_one_backward(stages[0], pipeline - rank, micro_batches),
        "interleaved": lambda: _interleaved(rank, stages, pipeline, micro_batches, zero_bubble=False),
        "interleaved-zb": lambda: _interleaved(rank, stages, pipeline, micro_batches, zero_bubble=True),
        "zbv": lambda: _zbv(rank, stages, pipeline, micro_batches),
        "dualpipev": lambda: _dualpipev(rank, stages, pipeline, micro_batches),
    }
    return _count(programs[schedule](), micro_batches)


def _count(program: Program, micro_batches: int) -> tuple[Action, ...]:
    """Number the micro-batches. A whole backward counts as both of its halves; numbers beyond the last are left out."""
    done: dict[tuple[int, str], int] = defaultdict(int)
    actions = []
    for stage, kind in program:
        micro_batch = done[stage, "I" if kind == "B" else kind]
        for part in "IW" if kind == "B" else kind:
            done[stage, part] += 1
        if micro_batch < micro_batches:
            actions.append(Action(stage, kind, micro_batch))
    return tuple(actions)


def _gpipe(stage: int, micro_batches: int) -> Program:
    yield from [(stage, "F")] * micro_batches
    yield from [(stage, "B")] * micro_batches


def _one_forward_one_backward(stage: int, to_the_end: int, micro_batches: int) -> Program:
    warm_up = min(to_the_end, micro_batches)
    yield from [(stage, "F")] * warm_up
    for _ in range(micro_batches - warm_up):
        yield stage, "B"
        yield stage, "F"
    yield from [(stage, "B")] * warm_up


def _interleaved(rank: int, stages: list[int], pipeline: int, micro_batches: int, *, zero_bubble: bool) -> Program:
    """Rounds of about `pipeline` micro-batches go through each chunk in turn; with zero_bubble the weight gradients lag
    behind the input gradients by as many backwards as the rank has ranks before it."""
    rounds = max(1, micro_batches // pipeline)
    if micro_batches % rounds:
        raise ValueError(f"{micro_batches} micro-batches do not divide into {rounds} rounds")
    per_round, total = micro_batches // rounds, micro_batches * len(stages)
    hops = pipeline - 1 - rank
    warm_up = min(total, (len(stages) - 1) * per_round + (1 if zero_bubble else 2) * hops)

    def chunk(index: int) -> int:
        return index // per_round % len(stages)

    backward = [stages[len(stages) - 1 - chunk(index)] for index in range(total)]
    yield from ((stages[chunk(index)], "F") for index in range(warm_up))
    for index in range(total):
        if warm_up + index < total:
            yield stages[chunk(warm_up + index)], "F"
        yield backward[index], "I" if zero_bubble else "B"
        if zero_bubble and index >= rank:
            yield backward[index - rank], "W"
    if zero_bubble:
        yield from ((stage, "W") for stage in backward[max(0, total - rank) :])


def _zbv(rank: int, stages: list[int], pipeline: int, micro_batches: int) -> Program:
    """Built for at least 2 · pipeline - 1 micro-batches; with fewer, those that do not exist are skipped."""
    first, second = stages
    many = max(2 * pipeline - 1, micro_batches)
    hops = pipeline - rank
    forward = 2 * hops - 1 + rank
    yield from [(first, "F")] * (2 * hops - 1)
    for _ in range(rank):
        yield second, "F"
        yield first, "F"
    for _ in range(hops):
        yield from ((second, kind) for kind in "FIW")
    second_forward = rank + hops
    while second_forward < many:
        if forward < many:
            yield first, "F"
            forward += 1
        yield from ((first, kind) for kind in "IW")
        yield from ((second, kind) for kind in "FIW")
        second_forward += 1
    for _ in range(rank):
        yield first, "I"
        yield second, "I"
    for _ in range(hops):
        yield from ((first, kind) for kind in "IW")
    yield from [(second, "W")] * rank
    yield from [(first, "W")] * rank


def _dualpipev(rank: int, stages: list[int], pipeline: int, micro_batches: int) -> Program:
    """Forwards of one chunk beside backwards of the other. PyTorch runs such a pair one after the other unless told how
    to overlap it, so a pair is two actions here."""
    if micro_batches < 2 * pipeline:
        raise ValueError(f"{micro_batches} micro-batches are fewer than {2 * pipeline}")
    first, second = stages
    hops = pipeline - 1 - rank
    yield from [(first, "F")] * (2 * hops)
    for _ in range(rank + 1):
        yield first, "F"
        yield second, "F"
    for _ in range(hops):
        yield from ((second, kind) for kind in "IWF")
    for _ in range(micro_batches - 2 * pipeline + rank + 1):
        yield from ((first, "F"), (second, "B"), (second, "F"), (first, "B"))
    for _ in range(hops):
        yield from ((second, "B"), (second, "F"), (first, "B"))
    pending: list[int] = []  # stages whose weight gradient is still to come, oldest first
    last = [second, first] * (rank + 1)
    split_from = 2 * ((rank + 1) // 2) + (rank % 2 == 0)  # the later half is split, to fill the end
    for index, stage in enumerate(last):
        split = index >= split_from
        yield stage, "I" if split else "B"
        pending += [stage] * split
    for _ in range(hops):
        if pending:
            yield pending.pop(0), "W"
        yield first, "I"
        pending.append(first)
    yield from ((stage, "W") for stage in pending)
