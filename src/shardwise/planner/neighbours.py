"""What each neighbouring choice of a layout would change: one decision altered, data parallelism making up for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.planner.search import Found
from shardwise.planner.single import judge
from shardwise.planner.step import StepModel
from shardwise.spec import Cluster, InputError, Layout, Model, Recipe
from shardwise.spec.memory import GIB

Change = tuple[str, Layout | str]  # in words; the layout that it makes, or why there is none
_LOSSES, _OFFLOADS = ("full", "chunked"), ("none", "optimizer", "parameters", "activations")
_SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "interleaved-zb": 2, "zbv": 2, "dualpipev": 2}  # virtual stages


@dataclass(frozen=True)
class Neighbour:
    """`change`: 'tp 8 → 4'. Where it may not run, `reason` says why and the rest is None.

    step_change: share by which the time per token moves, which at a given batch is the step's; -0.11 is 11 % less.
    memory_change: bytes of live memory on the fullest rank.
    """

    change: str
    layout: Layout | None = None
    step_change: float | None = None
    memory_change: float | None = None
    verdict: str | None = None
    reason: str | None = None

    def line(self) -> str:
        """'tp 8 → 4: −11 % step, +9.3 GiB'"""
        if self.step_change is None or self.memory_change is None:
            return f"{self.change}: not possible: {self.reason}"
        words = {"oom": ", does not fit", "tight": ", tight"}.get(self.verdict or "", "")
        step, memory = 100 * self.step_change, self.memory_change / GIB
        return f"{self.change}: {_signed(step, 0 if abs(step) >= 10 else 1)} % step, {_signed(memory, 1)} GiB{words}"


def neighbours(found: Found, recipe: Recipe) -> tuple[Neighbour, ...]:
    """Every degree halved and doubled, and every other choice replaced, one at a time; the fastest first, those that
    cannot run last."""
    subject = found.subject
    model, cluster, stack = subject.model, subject.cluster, subject.stack
    steps = StepModel(subject)
    result = []
    for change, wanted in _changes(found.layout, model, cluster):
        if isinstance(wanted, str):
            result.append(Neighbour(change, reason=wanted))
            continue
        try:
            other = judge(model, wanted, cluster, recipe, stack, steps=steps)
        except InputError as error:
            result.append(Neighbour(change, wanted, reason=str(error).splitlines()[0]))
            continue
        result.append(
            Neighbour(
                change,
                wanted,
                found.tokens_per_second / other.tokens_per_second - 1,
                other.memory.live - found.memory.live,
                other.verdict,
            )
        )
    return tuple(sorted(result, key=lambda item: (item.reason is not None, item.step_change or 0.0)))


def spread(layout: Layout, gpus: int, **changes: object) -> Layout | str:
    """The layout with `changes` made, and data parallelism over what is left of the chips: dp_shard makes up, or
    dp_replicate where nothing is sharded. A sentence where none is left."""
    changed = Layout.load({**layout.model_dump(), **changes})
    fixed = changed.tp * changed.cp * changed.pp
    sharded = changed.zero > 0 or layout.data_ranks == 1  # one data rank says nothing about how several would share
    if sharded:
        fixed *= changed.dp_replicate
    if gpus % fixed:
        degrees = "tp · cp · pp" + (" · dp_replicate" if sharded and changed.dp_replicate > 1 else "")
        return f"{degrees} = {fixed} does not divide the {gpus} chips"
    data = gpus // fixed
    if not sharded:
        return changed.model_copy(update={"dp_replicate": data, "dp_shard": 1})
    zero = changed.zero
    if data == 1 and (changed.cp == 1 or changed.dp_replicate > 1):
        zero = 0  # there is nothing to share
    elif data > 1 and zero == 0:
        zero = 3 if changed.pp == 1 else 2
    return changed.model_copy(update={"dp_shard": data, "zero": zero})


def _changes(layout: Layout, model: Model, cluster: Cluster) -> Iterator[Change]:
    """Every change, whether it may run or not."""
    gpus = cluster.gpus
    degrees = ["tp", "cp", "pp"] + (["dp_replicate"] if layout.zero else []) + (["ep"] if model.experts else [])
    for field in degrees:
        for value in _halved_and_doubled(getattr(layout, field)):
            changes: dict[str, object] = {field: value}
            if field == "pp" and value == 1:
                changes |= {"schedule": "1f1b", "virtual_stages": 1}
            elif field == "pp" and layout.pp == 1 and layout.zero == 3:
                changes["zero"] = 2  # under a pipeline, ZeRO-3 gathers again for every micro-batch
            yield _told(layout, field, spread(layout, gpus, **changes), value)
    for value in _halved_and_doubled(layout.micro_batch):
        yield _told(layout, "micro_batch", layout.model_copy(update={"micro_batch": value}), value)
    yield from _zero(layout)
    for policy in ("none", "selective", "full"):
        if policy != layout.recompute:
            yield _told(layout, "recompute", layout.model_copy(update={"recompute": policy}), policy)
    if layout.pp > 1:
        yield from _schedules(layout)
    for field, choices in {"loss": _LOSSES, "offload": _OFFLOADS}.items():
        for choice in choices:
            if choice != getattr(layout, field):
                yield _told(layout, field, layout.model_copy(update={field: choice}), choice)


def _zero(layout: Layout) -> Iterator[Change]:
    """DDP replicates what ZeRO shards, so the degrees change places."""
    if layout.data_ranks == 1:
        return
    for zero in (0, 1, 2, 3):
        if zero == layout.zero:
            continue
        degrees = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
        if zero == 0:
            degrees = {"dp_replicate": layout.data_ranks, "dp_shard": 1}
        elif layout.zero == 0:
            degrees = {"dp_replicate": 1, "dp_shard": layout.data_ranks}
        yield _told(layout, "zero", layout.model_copy(update={"zero": zero, **degrees}), zero)


def _schedules(layout: Layout) -> Iterator[Change]:
    for name, virtual in _SCHEDULES.items():
        if name != layout.schedule:
            chosen = layout.model_copy(
                update={
                    "schedule": name,
                    "virtual_stages": virtual,
                    # as in `search`: only these schedules run compiled stages
                    "compile": layout.compile and name in ("1f1b", "interleaved"),
                }
            )
            yield _told(layout, "schedule", chosen, name)
        elif name.startswith("interleaved"):
            for value in _halved_and_doubled(virtual := layout.virtual_stages):
                if value > 1:
                    chosen = layout.model_copy(update={"virtual_stages": value})
                    yield _told(layout, "virtual_stages", chosen, value)


def _halved_and_doubled(value: int) -> list[int]:
    return ([value // 2] if value % 2 == 0 else []) + [2 * value]


def _told(layout: Layout, field: str, wanted: Layout | str, value: object) -> Change:
    """'tp 8 → 4 (dp_shard 4 → 8)'"""
    text = f"{field} {getattr(layout, field)} → {value}"
    if isinstance(wanted, str):
        return text, wanted
    others = [
        f"{name} {getattr(layout, name)} → {getattr(wanted, name)}"
        for name in ("dp_replicate", "dp_shard", "zero", "schedule", "virtual_stages")
        if name != field and getattr(layout, name) != getattr(wanted, name)
    ]
    return text + (f" ({', '.join(others)})" if others else ""), wanted


def _signed(value: float, digits: int) -> str:
    """With a sign that is as wide as a plus; '±0.0' where nothing is left after rounding."""
    text = f"{abs(value):.{digits}f}"
    return ("±" if not float(text) else "+" if value > 0 else "−") + text
