"""Search: every legal layout of a model on a cluster, the fastest that fit first.

The layouts of one tp, cp, pp and ep make a Space, times each (loss, offload). A Space is timed as a whole with
closed-form bubbles, and what a lower bound of the memory rules out is dropped as a whole. What is left of all Spaces is
walked from the fastest on, and memory is predicted, until enough fit. A Space with a chunked loss or with offloading is
no faster than without, so it is timed only once the walk has come to where it could begin: nothing is passed over.
GPipe is in the space too, but by the closed forms it takes as long as 1F1B, which needs no more memory and comes first.
The survivors' pipelines are then simulated, and they are ranked again.
"""

from __future__ import annotations

import functools
import heapq
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.planner.candidates import spaces, variants
from shardwise.planner.estimate import Estimates, Space
from shardwise.planner.memory import Verdict, capacity_bytes, predict_memory
from shardwise.planner.memory.bound import least_used
from shardwise.planner.offload import verdict_of
from shardwise.planner.recompute import recompute_of
from shardwise.planner.stacks import Stack
from shardwise.planner.step import StepModel, StepTime
from shardwise.planner.subject import Subject, subject_of
from shardwise.spec import Cluster, InputError, Layout, Model, Recipe
from shardwise.spec.combinations import conflicts
from shardwise.spec.experts import Experts
from shardwise.spec.memory import Memory

_KEPT = 24  # sets of degrees whose pipelines are simulated, at least: closed forms rank them only roughly

Index = tuple[int, ...]  # of a split, a size, a recompute policy and a schedule


@dataclass(frozen=True)
class Found:
    """One layout with its predictions."""

    subject: Subject
    step: StepTime
    memory: Memory
    verdict: Verdict

    @property
    def layout(self) -> Layout:
        return self.subject.layout

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        layout = self.layout
        tokens = layout.data_ranks * layout.micro_batch * self.subject.micro_batches * self.subject.sequence
        return tokens / self.step.seconds


@dataclass(frozen=True)
class Search:
    """The best first; how many were refused and why; how many there were; how long it took."""

    found: tuple[Found, ...]
    rejected: dict[str, int]
    searched: int
    seconds: float


def search(model: Model, cluster: Cluster, recipe: Recipe, stack: Stack, *, top: int = 10) -> Search:
    """The `top` fastest layouts that fit, one per set of degrees; the least bad one where none fits.

    Without recipe.batch_tokens each data rank gets as few micro-batches a step as its schedule allows. Raises
    InputError where no layout is legal.
    """
    began = time.perf_counter()
    rejected: Counter[str] = Counter()
    base = subject_of(model, Layout.load({}), cluster, stack, recipe, 1)
    steps = StepModel(base)
    legal = spaces(model, cluster, recipe, rejected)
    streams = [
        _Stream(base, space, times, loss, offload)
        for space, times in [(space, Estimates(steps, base, space)) for space in legal]
        for loss, offload in variants(cluster)
    ]
    streams = [stream for stream in streams if stream.count]
    if not streams:
        raise InputError(
            f"no layout of {model.name} on {cluster.gpus} × {cluster.gpu.name} is legal: "
            + "; ".join(f"{count} × {reason}" for reason, count in rejected.most_common(5))
        )
    found = _walk(streams, steps, rejected, most=max(_KEPT, 3 * top))
    found.sort(key=lambda item: (item.verdict == "oom", -item.tokens_per_second))
    searched = sum(stream.count for stream in streams)
    return Search(tuple(found[:top]), dict(rejected), searched, time.perf_counter() - began)


@functools.lru_cache(maxsize=4096)
def _go_together(
    tied: bool, drops: bool, zero: int, spread: bool, piped: bool, offload: str, recompute: str, schedule: str
) -> bool:
    """Whether `conflicts` has nothing against these choices, which are all that the search makes of those it knows."""
    experts = Experts.model_validate({"count": 1, "top_k": 1, "ffn": 1, "capacity_factor": 1.0}) if drops else None
    fields: dict[str, Any] = {"name": "", "tied": tied, "experts": experts}
    choices: dict[str, Any] = {"zero": zero, "ep": 1 + spread, "pp": 1 + piped, "offload": offload}
    layout = Layout.model_construct(**choices, recompute=recompute, schedule=schedule)  # type: ignore[arg-type]
    return not any(conflicts(Model.model_construct(**fields), layout))


class _Stream:
    """The layouts of a Space with one loss kernel and one kind of offloading, the fastest first, without those that the
    bound of the memory rules out."""

    def __init__(self, base: Subject, space: Space, times: Estimates, loss: str, offload: str):
        self.base, self.space, self.times = base, space, times
        self.changes = {"loss": loss, "offload": offload}
        self.shape = len(space.splits), len(space.sizes), len(space.recomputes), len(space.schedules)
        self.degrees = [
            (split.dp_replicate, split.dp_shard, split.tp, split.cp, split.pp, split.ep) for split in space.splits
        ]
        self.allowed = np.array(space.allowed)[None, :, None] & self._go_together()[:, None]
        self.count = int(self.allowed.sum())
        self.order: np.ndarray[Any, np.dtype[np.intp]] | None = None

    def _go_together(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which splits, recompute policies and schedules go together: (splits, policies, schedules)."""
        model, offload = self.base.model, self.changes["offload"]
        features = model.tied, bool(model.experts and model.experts.capacity_factor)

        split = self.space.splits[0]
        where = (split.ep > 1, split.pp > 1, offload)
        by_zero = [
            [
                [_go_together(*features, zero, *where, policy, schedule) for schedule, _ in self.space.schedules]
                for policy in self.space.recomputes
            ]
            for zero in range(4)
        ]
        return np.array(by_zero)[[split.zero for split in self.space.splits]]

    def open(self) -> int:
        """Time all; the number of those that are left out."""
        seconds = self.times.seconds(**self.changes)
        tokens = [self.space.splits[0].data_ranks * size * number for size, number in self.space.sizes]
        seconds = np.where(self.allowed, seconds / np.array(tokens)[:, None, None], np.inf).ravel()
        self.used = np.where(self.allowed, least_used(self.base, self.space, **self.changes), np.inf).ravel()
        capacity = capacity_bytes(self.base.cluster.gpu)
        left = np.flatnonzero(np.isfinite(seconds) & (self.used <= (np.inf if capacity is None else capacity)))
        self.fastest = float(seconds.min())
        self.order = left[np.argsort(seconds[left], kind="stable")]
        self.seconds, self.place = seconds[self.order], 0
        return self.count - len(left)

    def subject(self, index: Index) -> Subject:
        split, size, recompute, schedule = index
        space = self.space
        name, virtual = space.schedules[schedule]
        micro_batch, micro_batches = space.sizes[size]
        changes = {"micro_batch": micro_batch, "recompute": space.recomputes[recompute], "schedule": name}
        layout = space.splits[split].model_copy(update={**self.changes, **changes, "virtual_stages": virtual})
        again = recompute_of(space.recomputes[recompute])
        return replace(self.base, layout=layout, micro_batches=micro_batches, recompute=again)

    def index(self, place: int) -> Index:
        _, sizes, recomputes, schedules = self.shape
        place, schedule = divmod(place, schedules)
        place, recompute = divmod(place, recomputes)
        return (*divmod(place, sizes), recompute, schedule)


def _walk(streams: list[_Stream], steps: StepModel, rejected: Counter[str], most: int) -> list[Found]:
    """From the fastest on, the first of each set of degrees that fits. Where none does, the leanest of all."""
    found: dict[tuple[int, ...], Found] = {}
    memories = _Memories()
    queue: list[tuple[float, int]] = []
    plain: dict[int, float] = {}  # the least time of a Space
    refused = 0
    for number, stream in enumerate(streams):
        if id(stream.space) not in plain:
            refused += stream.open()
            plain[id(stream.space)] = 0.9 * stream.fastest  # pieces of the loss may fill a chip a little better
            if len(stream.seconds):
                heapq.heappush(queue, (float(stream.seconds[0]), number))
        else:
            heapq.heappush(queue, (plain[id(stream.space)], number))
    most = min(most, len({degrees for stream in streams for degrees in stream.degrees}))
    while queue and len(found) < most:
        number = heapq.heappop(queue)[1]
        stream = streams[number]
        if stream.order is None:
            if all(degrees in found for degrees in stream.degrees):
                continue
            refused += stream.open()
        else:
            index = stream.index(int(stream.order[stream.place]))
            stream.place += 1
            degrees = stream.degrees[index[0]]
            if degrees not in found:
                fitting = memories.fitting(stream, number, index)
                if fitting is None:
                    refused += 1
                else:
                    subject, memory, judged = fitting
                    found[degrees] = Found(subject, steps.predict(subject), memory, judged)
        if stream.place < len(stream.seconds):
            heapq.heappush(queue, (float(stream.seconds[stream.place]), number))
    if refused:
        rejected["out of memory"] = refused
    return list(found.values()) or [_leanest(streams, steps)]


def _leanest(streams: list[_Stream], steps: StepModel) -> Found:
    """Of the least of each stream, by the bound, the leanest."""
    least = sorted(streams, key=lambda stream: float(stream.used.min()))[:50]
    subjects = [stream.subject(stream.index(int(stream.used.argmin()))) for stream in least]
    memory, subject = min(((predict_memory(item), item) for item in subjects), key=lambda pair: pair[0].live)
    return Found(_loaded(subject), steps.predict(subject), memory, "oom")


def _loaded(subject: Subject) -> Subject:
    """With its layout checked."""
    return replace(subject, layout=Layout.load(subject.layout.model_dump()))


class _Memories:
    """Memory, predicted as seldom as possible: what did not fit does not fit with a larger micro-batch either, or with
    fewer shards, or with less recompute."""

    def __init__(self) -> None:
        self._too_large: dict[Index, list[tuple[int, int]]] = {}  # (micro-batch, shards)

    def fitting(self, stream: _Stream, number: int, index: Index) -> tuple[Subject, Memory, Verdict] | None:
        _, size, recompute, schedule = index
        space, split = stream.space, stream.space.splits[index[0]]
        micro_batch, micro_batches = space.sizes[size]
        # Gradients are held from one micro-batch to the next: two need more than one, and with zero 2 three than two.
        alike = number, split.zero, schedule, min(micro_batches, 3)
        for leaner in range(recompute, len(space.recomputes)):
            for least, shards in self._too_large.get((*alike, leaner), ()):
                if least <= micro_batch and shards >= split.dp_shard:
                    return None
        subject = stream.subject(index)
        memory = predict_memory(subject)
        judged = verdict_of(subject, memory)
        if judged == "oom":
            self._too_large.setdefault((*alike, recompute), []).append((micro_batch, split.dp_shard))
            return None
        return _loaded(subject), memory, judged
