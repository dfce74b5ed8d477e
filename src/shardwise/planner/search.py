"""Search: every legal layout of a model on a cluster, the fastest that fit first.

Three passes. All legal degrees are listed and timed with closed-form bubbles (some ten microseconds each). They are
walked from the best on, and the memory of each is predicted until enough fit. The survivors' pipelines are then
simulated, and they are ranked again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.planner.memory import Verdict, predict_memory, verdict
from shardwise.planner.recompute import recompute_of
from shardwise.planner.stacks import Stack
from shardwise.planner.step import StepModel, StepTime
from shardwise.planner.subject import Subject, assumed_micro_batches
from shardwise.spec import Cluster, InputError, Layout, Model, Recipe
from shardwise.spec.legality import divisors, enough_micro_batches, illegal, untrainable
from shardwise.spec.memory import Memory

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_SCHEDULES = (("1f1b", (1,)), ("interleaved", (2, 3, 4, 5, 6, 8)), ("interleaved-zb", (2, 4)), ("zbv", (2,)),
              ("dualpipev", (2,)))  # fmt: skip
_RECOMPUTES = ("none", "selective", "full")
_KEPT = 24  # sets of degrees whose pipelines are simulated, at least: closed forms rank them only roughly
_PREDICTED = 8000  # memories that are predicted at the most

# A subject with its degrees, its micro-batches, recompute policy, and (schedule, virtual stages).
Choice = tuple[Subject, int, str, tuple[str, int]]


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


def search(
    model: Model, cluster: Cluster, recipe: Recipe, stack: Stack, *, top: int = 10, trainable: bool = False
) -> Search:
    """The `top` fastest layouts that fit, one per set of degrees; the least bad one where none fits.

    trainable: only layouts that `train` can run today. Without recipe.batch_tokens each data rank gets as few
    micro-batches a step as its schedule allows. Raises InputError where no layout is legal.
    """
    began = time.perf_counter()
    rejected: Counter[str] = Counter()
    timed: list[tuple[float, int, Choice]] = []
    base = Subject(model, Layout.load({}), cluster, stack, recipe.sequence, 1)
    steps = StepModel(base)
    for layout, micro_batches, recompute, schedules in candidates(model, cluster, recipe, rejected):
        if trainable and any(untrainable(model, layout.model_copy(update={"recompute": recompute}))):
            continue
        subject = replace(base, layout=layout, recompute=recompute_of(recompute))
        tokens = layout.data_ranks * layout.micro_batch * micro_batches
        for choice, seconds in zip(schedules, steps.estimate(subject, micro_batches, schedules), strict=True):
            timed.append((seconds / tokens, len(timed), (subject, micro_batches, recompute, choice)))
    if not timed:
        raise InputError(
            f"no layout of {model.name} on {cluster.gpus} × {cluster.gpu.name} is legal: "
            + "; ".join(f"{count} × {reason}" for reason, count in rejected.most_common(5))
        )
    timed.sort()
    found = _fitting((choice for _, _, choice in timed), steps, rejected, most=max(_KEPT, 3 * top))
    found.sort(key=lambda item: (item.verdict == "oom", -item.tokens_per_second))
    return Search(tuple(found[:top]), dict(rejected), len(timed), time.perf_counter() - began)


def _subject(choice: Choice) -> Subject:
    subject, micro_batches, recompute, (schedule, virtual) = choice
    changes = {"schedule": schedule, "virtual_stages": virtual, "recompute": recompute}
    layout = Layout.load(subject.layout.model_copy(update=changes).model_dump())
    return replace(subject, layout=layout, micro_batches=micro_batches)


def _fitting(choices: Iterable[Choice], steps: StepModel, rejected: Counter[str], most: int) -> list[Found]:
    """Walk from the fastest on; keep the first of each set of degrees that fits. Where none does, the leanest."""
    found: dict[tuple[int, ...], Found] = {}
    memories = _Memories()
    for choice in choices:
        layout = choice[0].layout
        degrees = (layout.dp_replicate, layout.dp_shard, layout.tp, layout.cp, layout.pp, layout.ep)
        if degrees in found:
            continue
        fitting = memories.fitting(choice)
        if fitting is None:
            rejected["out of memory"] += 1
        else:
            subject, memory, judged = fitting
            found[degrees] = Found(subject, steps.predict(subject), memory, judged)
        if len(found) >= most or memories.predicted >= _PREDICTED:
            break
    if not found and memories.leanest:
        subject, memory = memories.leanest
        return [Found(subject, steps.predict(subject), memory, "oom")]
    return list(found.values())


class _Memories:
    """Memory of choices, predicted as seldom as possible: a larger micro-batch never needs less, and where even full
    recompute of one sequence does not fit, nothing of the same degrees and schedule does."""

    def __init__(self) -> None:
        self.predicted = 0
        self.leanest: tuple[Subject, Memory] | None = None
        self._too_large: dict[tuple[object, ...], int] = {}  # smallest micro-batch that was seen not to fit
        self._hopeless: dict[tuple[object, ...], bool] = {}

    def fitting(self, choice: Choice) -> tuple[Subject, Memory, Verdict] | None:
        base, _, recompute, schedule = choice
        layout = base.layout
        degrees = (layout.dp_replicate, layout.dp_shard, layout.tp, layout.cp, layout.pp, layout.ep, layout.zero)
        family = (degrees, schedule)
        if family not in self._hopeless:
            least = replace(base, layout=layout.model_copy(update={"micro_batch": 1}), recompute=recompute_of("full"))
            micro_batches = choice[1] * layout.micro_batch
            self._hopeless[family] = self._predict((least, micro_batches, "full", schedule))[2] == "oom"
        key = (family, recompute)
        if self._hopeless[family] or layout.micro_batch >= self._too_large.get(key, layout.micro_batch + 1):
            return None
        subject, memory, judged = self._predict(choice)
        if judged == "oom":
            self._too_large[key] = layout.micro_batch
            return None
        return subject, memory, judged

    def _predict(self, choice: Choice) -> tuple[Subject, Memory, Verdict]:
        self.predicted += 1
        subject = _subject(choice)
        memory = predict_memory(subject)
        judged = verdict(memory, subject.cluster.gpu)
        if judged == "oom" and (self.leanest is None or memory.live < self.leanest[1].live):
            self.leanest = subject, memory
        return subject, memory, judged


def candidates(
    model: Model, cluster: Cluster, recipe: Recipe, rejected: Counter[str]
) -> Iterator[tuple[Layout, int, str, list[tuple[str, int]]]]:
    """Every legal set of degrees with its micro-batch, number of micro-batches and recompute policy, and the (schedule,
    virtual stages) that it allows. What is refused is counted in `rejected`, by reason."""
    batch = recipe.batch_sequences if recipe.batch_tokens else None
    for layout in _degrees(model, cluster):
        problem = next(illegal(model, layout, recipe.model_copy(update={"batch_tokens": None})), None)
        if problem:
            rejected[_reason(problem)] += 1
            continue
        for micro_batch in _MICRO_BATCHES:
            micro_batches = assumed_micro_batches(layout)
            if batch is not None:
                if batch % (layout.data_ranks * micro_batch):
                    rejected["the batch does not divide over data ranks and micro-batches"] += 1
                    continue
                micro_batches = batch // (layout.data_ranks * micro_batch)
            schedules = _schedules(model, layout.pp, micro_batches, rejected)
            if schedules:
                chosen = layout.model_copy(update={"micro_batch": micro_batch})
                for recompute in _RECOMPUTES:
                    yield chosen, micro_batches, recompute, schedules


def _schedules(model: Model, pipeline: int, micro_batches: int, rejected: Counter[str]) -> list[tuple[str, int]]:
    if pipeline == 1:
        return [("1f1b", 1)]
    allowed = []
    for schedule, chunks in _SCHEDULES:
        if not enough_micro_batches(schedule, pipeline, micro_batches):
            rejected[f"{schedule} cannot do so few micro-batches, or not that number"] += 1
            continue
        allowed += [(schedule, virtual) for virtual in chunks if pipeline * virtual <= model.layers]
    return allowed


def _degrees(model: Model, cluster: Cluster) -> Iterator[Layout]:
    """All products of degrees that make the number of chips; tensor parallelism stays within the fast domain."""
    gpus, domain = cluster.gpus, min(cluster.gpus, cluster.gpu.domain)
    for tp in (n for n in divisors(gpus) if n <= domain):
        for pp in (n for n in divisors(gpus // tp) if n <= model.layers):
            for cp in divisors(gpus // (tp * pp)):
                data = gpus // (tp * pp * cp)
                for shard in divisors(data):
                    for ep in divisors(shard * cp * tp) if model.experts else [1]:
                        stages: tuple[Literal[0, 2, 3], ...] = (0,) if shard == 1 else (2, 3)
                        for zero in stages:
                            yield Layout.model_construct(
                                dp_replicate=data // shard, dp_shard=shard, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero
                            )


def _reason(problem: str) -> str:
    """A refusal without its numbers, so that equal ones can be counted."""
    words = [word for word in problem.split(";")[0].split() if not any(char.isdigit() for char in word)]
    return " ".join(words)
