"""`rehearse`: the real training step of a rank, without the cluster, and the planner's figures beside it."""

from __future__ import annotations

import dataclasses
import datetime
import time
from pathlib import Path
from typing import Any

from shardwise.planner.alone import alone_seconds
from shardwise.planner.memory import VERDICTS, predict_memory, verdict
from shardwise.planner.search import search
from shardwise.planner.single import micro_batches_of, refusals
from shardwise.planner.stacks import own_stack
from shardwise.planner.subject import Subject, subject_of
from shardwise.spec import Gpu, InputError, Run, load_run
from shardwise.spec.memory import Memory
from shardwise.spec.noun import unknown
from shardwise.spec.plan import Verdict
from shardwise.spec.trainable import untrainable, untrainable_precision
from shardwise.verbs.beside import PREDICTIONS, append
from shardwise.verbs.resolve import resolve_layout

_CHOICES = ("fullest", "all-distinct")


@dataclasses.dataclass(frozen=True)
class Rehearsals:
    """`run` has its layout and batch fixed; `ranks` are Rehearsal's (rehearsal/result.py), in order of rank."""

    run: Run
    ranks: tuple[Any, ...]
    verdict: Verdict  # of the fullest rank, by what the rehearsal says that it reserves
    notes: tuple[str, ...]
    seconds: float

    def dump(self) -> dict[str, Any]:
        """What `--json` prints: of one rank its document, of several `ranks` with those of all."""
        beside = {"verdict": self.verdict, "layout": self.run.fixed_layout.dump(), "notes": list(self.notes)}
        if len(self.ranks) == 1:
            return {**self.ranks[0].dump(), **beside}
        return {"ranks": [one.dump() for one in self.ranks], **beside, "seconds": self.seconds}


def rehearse(
    run: Run | str | Path,
    *,
    rank: int | str = "fullest",
    device: str = "cpu",
    steps: int = 2,
    imbalance: float = 1.0,
    pictures: str | Path | None = None,
    out: str | Path | None = None,
) -> Rehearsals:
    """Build the Run's own training step as a rank of its world has it, and run it: with fake tensors on a CPU, or with
    real kernels on one GPU; collectives do nothing.

    rank: of the world, `fullest` (by the planner) or `all-distinct` (the ends and the middle of the pipeline, and the
    last of the ranks that share a stage). imbalance: token copies that the rank's experts receive, over the mean, where
    there are no values to route by. pictures: a directory for the timeline of live bytes and a snapshot for PyTorch's
    memory viewer. out: a run directory whose predictions.jsonl gets a line for each rank. Raises InputError.
    """
    from shardwise.rehearsal.child import in_children
    from shardwise.rehearsal.rank import on_cpu
    from shardwise.rehearsal.result import Rehearsal

    start = time.perf_counter()
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device: {unknown('device', device, ('cpu', 'cuda'))}")
    if steps < 2:
        raise InputError(f"--steps {steps}: at least 2, since optimizer state begins with the first; nearest: 2")
    if not 1.0 <= imbalance <= 100.0:
        raise InputError(f"--imbalance {imbalance:g}: from 1 (routing is even) to 100 is expected")
    run, notes = fixed(run if isinstance(run, Run) else load_run(run))
    subject = subject_of_run(run)
    ranks = ranks_of(run, subject, rank)
    directory = _directory(pictures, "-o") if pictures is not None else None
    journal = _directory(out, "--out") if out is not None else None
    per_stage = run.fixed_layout.world // run.fixed_layout.pp
    predicted = [predict_memory(subject, number // per_stage) for number in ranks]
    if device == "cuda":
        from shardwise.rehearsal.gpu import on_gpu

        found = in_children(on_gpu, [(run, number, steps, imbalance, directory) for number in ranks], at_once=1)
    else:
        found = in_children(on_cpu, [(run, number, steps, imbalance, directory) for number in ranks])
    results = tuple(
        Rehearsal(**fields, predicted=memory, predicted_seconds=alone_seconds(subject, memory.stage))
        for fields, memory in zip(found, predicted, strict=True)
    )
    answer = Rehearsals(run, results, _verdict(run, results, predicted), notes, time.perf_counter() - start)
    if journal is not None:
        _record(journal, answer)
    return answer


def fixed(run: Run) -> tuple[Run, tuple[str, ...]]:
    """The Run with its layout and its batch, and what was assumed. Raises InputError where it cannot run."""
    notes = []
    if isinstance(run.layout, str):
        if run.recipe.batch_tokens:
            run = resolve_layout(run, run.cluster.gpus)
        else:
            found = search(run.model, run.cluster, run.recipe, own_stack(run.cluster.gpu), top=1).found
            run = run.replace(layout=found[0].layout)
        notes.append(f"layout: auto is {run.fixed_layout.describe()}")
    layout = run.fixed_layout
    reasons = [*refusals(run.model, layout, run.cluster, run.recipe), *untrainable(run.model)]
    reasons += untrainable_precision(run.recipe.precision)
    if reasons:
        raise InputError("\n".join(reasons))
    if run.recipe.batch_tokens is None:
        count = micro_batches_of(layout, run.recipe)
        batch = count * layout.data_ranks * layout.micro_batch * run.recipe.sequence
        run = run.replace(recipe=run.recipe.model_copy(update={"batch_tokens": batch}))
        notes.append(f"recipe.batch_tokens is not given: {count} micro-batch(es) per data rank")
    return run, tuple(notes)


def subject_of_run(run: Run) -> Subject:
    layout, recipe = run.fixed_layout, run.recipe
    stack = own_stack(run.cluster.gpu)
    return subject_of(run.model, layout, run.cluster, stack, recipe, micro_batches_of(layout, recipe))


def ranks_of(run: Run, subject: Subject, wanted: int | str) -> list[int]:
    """The ranks that are meant. Raises InputError."""
    layout = run.fixed_layout
    text = str(wanted)
    if text.lstrip("-").isdigit():
        if not 0 <= int(text) < layout.world:
            raise InputError(f"--rank {text}: the layout has ranks 0 to {layout.world - 1}; nearest: "
                             f"{min(max(int(text), 0), layout.world - 1)}")  # fmt: skip
        return [int(text)]
    if text not in _CHOICES:
        raise InputError(f"--rank: {unknown('choice', text, _CHOICES)}, or a number")
    per_stage = layout.world // layout.pp
    if text == "fullest":
        return [predict_memory(subject).rank]
    stages = sorted({0, min(1, layout.pp - 1), layout.pp // 2, layout.pp - 1})
    return sorted({*(stage * per_stage for stage in stages), layout.world - 1})


def verdict_of(live: float, reserved: float, predicted: Memory, gpu: Gpu) -> Verdict:
    """By what was rehearsed, and outside of the allocator predicted. It fits where what the allocator would reserve
    does; where only what is live does, it is tight, since the allocator then gives back and asks again."""
    band = (live, max(live, reserved), max(live, 1.02 * reserved))
    return verdict(predicted.model_copy(update={"reserved": band}), gpu)


def _verdict(run: Run, results: tuple[Any, ...], predicted: list[Memory]) -> Verdict:
    """Of the fullest rank."""
    found = [
        verdict_of(one.live, one.reserved, memory, run.cluster.gpu)
        for one, memory in zip(results, predicted, strict=True)
    ]
    return max(found, key=VERDICTS.index)


def _directory(path: str | Path, option: str) -> Path:
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be made: {error.strerror or error}") from None
    return directory


def _record(out: Path, answer: Rehearsals) -> None:
    """One line for each rank: the Run, what was predicted, and what was found."""
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        for one in answer.ranks:
            append(out, {"verb": "rehearse", "time": time, **one.dump(), "run": answer.run.dump()})
    except OSError as error:
        raise InputError(f"--out: {out / PREDICTIONS} cannot be written: {error.strerror or error}") from None
