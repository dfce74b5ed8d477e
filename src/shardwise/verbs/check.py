"""`check`: is a Run legal, does it fit, is it advisable?"""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwise.planner.advice import COSTLY, Advice, advise
from shardwise.planner.advice_case import Case
from shardwise.planner.memory import capacity_bytes
from shardwise.planner.neighbours import neighbours
from shardwise.planner.search import Found
from shardwise.planner.single import refusals
from shardwise.planner.stacks import own_stack
from shardwise.planner.subject import dtype_of
from shardwise.spec import InputError, Layout, Run
from shardwise.spec.memory import GIB
from shardwise.spec.plan import Candidate
from shardwise.spec.presets import prices
from shardwise.spec.trainable import not_trainable
from shardwise.verbs.predicted import predict_run
from shardwise.verbs.resolve import resolve_layout


@dataclass(frozen=True)
class Finding:
    """One line of the answer. Errors make it a no, warnings do not. `saves_percent`: of the step time."""

    level: Literal["error", "warning"]
    topic: str
    text: str
    source: str
    saves_percent: float | None = None


@dataclass(frozen=True)
class Check:
    """Errors first. `candidate` is None where the Run is illegal, or its chip's figures are not known."""

    run: Run
    candidate: Candidate | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(item.level != "error" for item in self.findings)

    def dump(self) -> dict[str, Any]:
        """Plain types; `null` where something is unknown."""
        return {
            "ok": self.ok,
            "verdict": self.candidate.verdict if self.candidate else None,
            "findings": [asdict(item) for item in self.findings],
            "candidate": self.candidate.model_dump(mode="json", by_alias=True) if self.candidate else None,
            "notes": list(self.notes),
        }


def check(run: Run | dict[str, Any]) -> Check:
    """Every reason why a Run cannot run or does not fit, and advice about what it does needlessly.

    Advice counts as an error where heeding it saves more than 5 % of the step time, or where ignoring it puts the run
    at risk; else as a warning, as does memory that may or may not suffice. Raises InputError for what is no Run.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    unknown = _unknown_figures(run)
    if isinstance(run.layout, Layout):
        reasons = list(refusals(run.model, run.layout, run.cluster, run.recipe))
        if reasons:
            return Check(run, None, tuple(Finding("error", "legality", text, "spec/legality.py") for text in reasons))
    if unknown:
        return _legality_alone(run, unknown)
    try:
        run, found, candidate, notes = predict_run(run)
    except InputError as error:  # layout: auto, and no layout is legal
        return Check(run, None, (Finding("error", "legality", str(error), "spec/legality.py"),))
    advice = advise(Case(found, run.recipe, candidate.cost.hours, prices(), datetime.date.today()))
    findings = [*_memory(found, run), *(_finding(item) for item in advice)]
    findings.sort(key=lambda item: item.level)
    if found.layout.offload != "none":
        notes = (*notes, "layout.offload: neither the time of its copies nor the host's memory is predicted")
    return Check(run, candidate, tuple(findings), (*notes, *_not_yet(run)))


def _finding(advice: Advice) -> Finding:
    costly = advice.risk or (advice.gain or 0.0) > COSTLY
    percent = None if advice.gain is None else 100 * advice.gain
    return Finding("error" if costly else "warning", advice.topic, advice.text, advice.source, percent)


def _memory(found: Found, run: Run) -> list[Finding]:
    if found.verdict == "fits":
        return []
    low, _, high = (size / GIB for size in found.memory.used)
    source = "memory model (docs/memory.md)"
    capacity = (capacity_bytes(run.cluster.gpu) or 0.0) / GIB
    if not capacity:
        text = (
            f"whether it fits is unknown: rank {found.memory.rank} needs {low:.1f} to {high:.1f} GiB, and how much "
            f"{run.cluster.gpu.name} has is not known"
        )
        return [Finding("warning", "memory", text, source)]
    able = [item for item in neighbours(found, run.recipe) if item.verdict == "fits" and item.step_change is not None]
    nearest = f"; the fastest neighbour that fits: {able[0].line()}" if able else "; no neighbouring choice fits"
    if found.verdict == "oom":
        text = f"does not fit: rank {found.memory.rank} needs at least {low:.1f} GiB of {capacity:.1f}{nearest}"
        return [Finding("error", "memory", text, source)]
    text = f"may not fit: rank {found.memory.rank} needs {low:.1f} to {high:.1f} GiB of {capacity:.1f}{nearest}"
    return [Finding("warning", "memory", text, source)]


def _unknown_figures(run: Run) -> str | None:
    """Why nothing can be predicted on this chip; None where it can."""
    try:
        own_stack(run.cluster.gpu).speed(run.cluster.gpu, dtype_of(run.recipe.precision))
    except InputError as error:
        return str(error)
    return None


def _legality_alone(run: Run, why: str) -> Check:
    notes = (f"{why}: legality alone was checked",)
    if isinstance(run.layout, str):
        try:
            run = resolve_layout(run, run.cluster.gpus)
        except InputError as error:
            return Check(run, None, (Finding("error", "legality", str(error), "spec/legality.py"),), notes)
    return Check(run, None, (), (*notes, *_not_yet(run)))


def _not_yet(run: Run) -> list[str]:
    """What `train` refuses today."""
    return [f"train: {reason}" for reason in not_trainable(run.model, run.recipe)]
