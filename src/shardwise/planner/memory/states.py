"""What else a pipeline rank holds while it does each of its actions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardwise.planner.schedules import rank_order, stages_of, steady_micro_batches


@dataclass(frozen=True)
class State:
    """By place of the stage among those of the rank: micro-batches whose forward is done and whose backward is not (the
    action's own counts), those whose backward of inputs alone is done, whether gradients of the stage are there, and
    whether its last action was a backward, after which FSDP2 leaves weights gathered."""

    kind: str  # F, B, I, W
    place: int  # of the stage that the action is of
    held: tuple[int, ...]
    split: tuple[int, ...]
    begun: tuple[bool, ...]
    gathered: tuple[bool, ...]

    def within(self, other: State) -> bool:
        """Whether nothing is there that the other has not."""
        pairs = [(self.held, other.held), (self.split, other.split), (self.begun, other.begun)]
        pairs.append((self.gathered, other.gathered))
        return all(a <= b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def states(schedule: str, pipeline: int, micro_batches: int, virtual: int, rank: int, *, gathers: bool) -> list[State]:
    """Those of a step of which none is within another of the same action. gathers: weights are gathered for every
    forward and backward; else `gathered` says nothing.

    Raises ValueError for a number of micro-batches that the schedule cannot do.
    """
    if pipeline > 1 and schedule == "gpipe":
        return _gpipe(micro_batches)
    few = steady_micro_batches(schedule, pipeline, micro_batches)
    return _states(schedule, pipeline, few, virtual, rank, gathers)


def _gpipe(micro_batches: int) -> list[State]:
    """All forwards come first."""
    forward, first = (State(kind, 0, (micro_batches,), (0,), (False,), (False,)) for kind in "FB")
    second = State("B", 0, (micro_batches - 1,), (0,), (True,), (True,))
    return [forward, first, second][: 2 + (micro_batches > 1)]


@functools.lru_cache(maxsize=4096)
def _states(schedule: str, pipeline: int, micro_batches: int, virtual: int, rank: int, gathers: bool) -> list[State]:
    if pipeline == 1:
        return [State(kind, 0, (1,), (0,), (micro_batches > 1,), (False,)) for kind in "FB"]
    places = {stage: place for place, stage in enumerate(stages_of(schedule, pipeline, virtual, rank))}
    held, split = [0] * len(places), [0] * len(places)
    begun, gathered = [False] * len(places), [False] * len(places)
    found: dict[tuple[str, int], list[State]] = {}
    seen = set[State]()
    for stage, kind, _ in rank_order(schedule, pipeline, micro_batches, virtual, rank):
        place = places[stage]
        if kind == "F":
            held[place] += 1
        state = State(kind, place, tuple(held), tuple(split), tuple(begun), tuple(gathered))
        same = found.setdefault((kind, place), [])
        if state not in seen and not any(state.within(other) for other in same):
            found[kind, place] = [other for other in same if not other.within(state)] + [state]
        seen.add(state)
        if kind == "B":
            held[place] -= 1
        elif kind == "I":
            held[place], split[place] = held[place] - 1, split[place] + 1
        elif kind == "W":
            split[place] -= 1
        if kind in "BW":
            begun[place] = True
        gathered[place] = gathers and kind != "F"
    return [state for same in found.values() for state in same]
