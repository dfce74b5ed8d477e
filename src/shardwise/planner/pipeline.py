"""Event simulation of one pipeline step: when each action runs, how long ranks wait, what they hold meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.planner.schedules import Action, order


@dataclass(frozen=True)
class PipelineRun:
    """`spans[rank]`: (action, start, end) in seconds, in order."""

    spans: list[list[tuple[Action, float, float]]]

    @property
    def seconds(self) -> float:
        """From the first action's start to the last one's end, over all ranks."""
        return max(span[-1][2] for span in self.spans)

    def busy_seconds(self, rank: int) -> float:
        return sum(end - start for _, start, end in self.spans[rank])

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they wait for the pipeline."""
        busy = sum(self.busy_seconds(rank) for rank in range(len(self.spans)))
        return 1 - busy / (len(self.spans) * self.seconds)


def simulate(
    programs: Sequence[Sequence[Action]], seconds: Mapping[tuple[int, str], float], hop_seconds: float
) -> PipelineRun:
    """Run every rank's program as soon as its inputs are there.

    seconds: duration by (stage, kind). hop_seconds: from the end of an action to the start of the one on another rank
    that needs its result (activations forward, their gradients backward); 0 between stages of one rank.
    Raises ValueError where the programs wait for each other for ever.
    """
    rank_of = {action.stage: rank for rank, program in enumerate(programs) for action in program}
    last_stage = max(rank_of)
    ended: dict[tuple[int, str, int], float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in programs]
    clocks = [0.0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            done = spans[rank]
            for place in range(len(done), len(program)):
                action = program[place]
                ready = _ready(action, last_stage, ended, rank_of, hop_seconds)
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                clocks[rank] = start + seconds[action.stage, action.kind]
                done.append((action, start, clocks[rank]))
                kind = "I" if action.kind == "B" else action.kind
                ended[action.stage, kind, action.micro_batch] = clocks[rank]
                moved = True
    if any(len(done) < len(program) for done, program in zip(spans, programs, strict=True)):
        raise ValueError("the schedule deadlocks")
    return PipelineRun(spans)


def _ready(
    action: Action,
    last_stage: int,
    ended: Mapping[tuple[int, str, int], float],
    rank_of: Mapping[int, int],
    hop_seconds: float,
) -> float | None:
    """When the action's input is there; None where that is not known yet."""
    stage, kind, micro_batch = action
    if kind == "W":
        return ended.get((stage, "I", micro_batch))
    neighbour = stage - 1 if kind == "F" else stage + 1
    if neighbour < 0:
        return 0.0
    if neighbour > last_stage:
        return ended.get((stage, "F", micro_batch))
    end = ended.get((neighbour, "F" if kind == "F" else "I", micro_batch))
    if end is None or (kind != "F" and (stage, "F", micro_batch) not in ended):
        return None
    return end if rank_of[neighbour] == rank_of[stage] else end + hop_seconds


def total_seconds(
    schedule: str,
    pipeline: int,
    micro_batches: int,
    virtual: int,
    seconds: Mapping[tuple[int, str], float],
    hop_seconds: float,
) -> float:
    """`simulate(order(…), …).seconds`, for one schedule after the other with other durations."""
    kinds, steps = _linked(schedule, pipeline, micro_batches, virtual)
    durations = [seconds[kind] for kind in kinds]
    clocks, ends = [0.0] * pipeline, list[float]()
    for rank, kind, needs, hops in steps:
        start = clocks[rank]
        if needs >= 0:
            ready = ends[needs] + hop_seconds if hops else ends[needs]
            if ready > start:
                start = ready
        end = start + durations[kind]
        clocks[rank] = end
        ends.append(end)
    return max(clocks)


@functools.lru_cache(maxsize=64)
def _linked(
    schedule: str, pipeline: int, micro_batches: int, virtual: int
) -> tuple[list[tuple[int, str]], list[tuple[int, int, int, bool]]]:
    """Kinds of actions; and all actions in an order in which each comes after what it needs: rank, kind, the place of
    the action whose result it needs (-1 for none), and whether that is another rank's. Durations do not change it."""
    programs = order(schedule, pipeline, micro_batches, virtual)
    kinds = list(dict.fromkeys((action.stage, action.kind) for program in programs for action in program))
    number = {kind: index for index, kind in enumerate(kinds)}
    run = simulate(programs, dict.fromkeys(kinds, 1.0), 0.0)
    rank_of = {action.stage: rank for rank, program in enumerate(programs) for action in program}
    last, place = max(rank_of), dict[tuple[int, str, int], int]()
    # By the time of their end, since one that needs another ends later.
    found = sorted((end, rank, action) for rank, spans in enumerate(run.spans) for action, _, end in spans)
    steps = []
    for index, (_, rank, action) in enumerate(found):
        stage, kind, micro_batch = action
        if kind == "W":
            needed: tuple[int, str, int] | None = (stage, "I", micro_batch)
        elif kind == "F":
            needed = (stage - 1, "F", micro_batch) if stage else None
        else:
            needed = (stage, "F", micro_batch) if stage == last else (stage + 1, "I", micro_batch)
        hops = needed is not None and rank_of[needed[0]] != rank
        steps.append((rank, number[stage, kind], -1 if needed is None else place[needed], hops))
        place[stage, "I" if kind == "B" else kind, micro_batch] = index
    return kinds, steps


def in_flight(program: Sequence[Action]) -> list[dict[int, int]]:
    """Micro-batches whose activations a rank holds while each action runs, by stage: from F until B or W."""
    held: dict[int, int] = {}
    counts = []
    for stage, kind, _ in program:
        if kind == "F":
            held[stage] = held.get(stage, 0) + 1
        counts.append(dict(held))
        if kind in "BW":
            held[stage] -= 1
    return counts
