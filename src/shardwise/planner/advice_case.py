"""Case: one Run that advice is about, and predictions of what it could be instead. Advice: what is said of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.planner.memory import VERDICTS
from shardwise.planner.neighbours import spread
from shardwise.planner.search import Found
from shardwise.planner.single import judge
from shardwise.planner.step import StepModel
from shardwise.spec import Cluster, Gpu, InputError, Layout, Model, Recipe
from shardwise.spec.price import Price


@dataclass(frozen=True)
class Advice:
    """`gain`: share of the step time that heeding it saves, where it is about speed. `risk`: ignoring it may cost the
    run, or days of it. `source`: where the figure or the rule comes from."""

    topic: str
    text: str
    source: str
    gain: float | None = None
    risk: bool = False


@dataclass(frozen=True)
class Case:
    """What advice is about. `hours` of the whole run; None where its tokens are not known."""

    found: Found
    recipe: Recipe
    hours: float | None
    offers: tuple[Price, ...] = ()
    today: datetime.date = datetime.date.min

    @property
    def layout(self) -> Layout:
        return self.found.layout

    @property
    def model(self) -> Model:
        return self.found.subject.model

    @property
    def cluster(self) -> Cluster:
        return self.found.subject.cluster

    def layouts(self, *changes: dict[str, object]) -> list[Found]:
        """Predictions of the layout with each set of changes, data parallelism making up for them; only of those that
        may run and fit no worse."""
        wanted = (spread(self.layout, self.cluster.gpus, **change) for change in changes)
        return self.exactly(*(layout for layout in wanted if isinstance(layout, Layout)))

    def exactly(self, *layouts: Layout) -> list[Found]:
        """Likewise, of whole layouts."""
        steps = StepModel(self.found.subject)
        return self._judged((self.model, layout, self.cluster, steps) for layout in layouts)

    def with_model(self, model: Model) -> list[Found]:
        return self._judged([(model, self.layout, self.cluster, None)])

    def on(self, gpu: Gpu) -> list[Found]:
        cluster = self.cluster.model_copy(update={"gpu": gpu})
        return self._judged([(self.model, self.layout, cluster, None)])

    def saving(self, other: Found) -> float:
        """Share of the step time that the other prediction saves, per token."""
        return 1 - self.found.tokens_per_second / other.tokens_per_second

    def _judged(self, cases: Iterable[tuple[Model, Layout, Cluster, StepModel | None]]) -> list[Found]:
        worst = min(VERDICTS.index(self.found.verdict), VERDICTS.index("tight"))
        result = []
        for model, layout, cluster, steps in cases:
            try:
                other = judge(model, layout, cluster, self.recipe, self.found.subject.stack, steps=steps)
            except InputError:  # it may not run, or its chip's figures are not known
                continue
            if VERDICTS.index(other.verdict) <= worst:
                result.append(other)
        return result
