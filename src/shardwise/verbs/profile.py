"""`profile`: where the steps of a run go, from a few steps of our own trainer, or from traces of any."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shardwise.data import check_vocabulary, open_data, resolve_data
from shardwise.launching.local import launch
from shardwise.planner.search import Found
from shardwise.profiling.files import read_traces
from shardwise.profiling.profile import Measured, Profile, Recompilation, analyse
from shardwise.spec import InputError, Run, load_run
from shardwise.spec.trainable import require_trainable
from shardwise.verbs.beside import append, line_of, predicted
from shardwise.verbs.profile_rank import STEPS_FILE, WARM_UP, trace_name
from shardwise.verbs.resolve import resolve_layout
from shardwise.verbs.unfinished import Unfinished

WORKER = (sys.executable, "-m", "shardwise.verbs.profile_rank")
TRACES = "profile"  # below the run's directory
MOST_STEPS = 50  # that a trace may hold: a step is some megabytes on every rank


def profile(
    run: Run | str | Path,
    *,
    out: str | Path,
    steps: int = 5,
    nproc: int | None = None,
    say: Callable[[str], None] = print,
) -> Profile:
    """Train a Run for 2 + 2 · `steps` + 1 steps on this machine, the last `steps` under PyTorch's profiler, and analyse
    them. Nothing is saved of the model.

    Leaves the ranks' traces in `out`/profile, and appends prediction and measurement to `out`/predictions.jsonl.
    Raises InputError, and Unfinished where a rank failed. Main thread only.
    """
    run = run if isinstance(run, Run) else load_run(run)
    if not 1 <= steps <= MOST_STEPS:
        raise InputError(f"--steps {steps}: 1 to {MOST_STEPS} are expected, since every step makes the trace longer")
    run, ranks = _prepare(run, nproc, steps)
    directory = Path(out) / TRACES
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / "run.yaml").write_text(run.to_yaml())
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    where = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {run.fixed_layout.describe()}"
    say(f"{run.model.name} on {where}: {WARM_UP} steps to warm up, {steps} timed, {steps} traced")
    command = [*WORKER, str(directory / "run.yaml"), str(directory), str(steps)]
    code = launch(command, ranks, say=say, how_to_continue="stopped before the profile was complete")
    if code:
        raise Unfinished("profile", code)
    found, note = predicted(run)
    measured, compiled = _measured(directory / STEPS_FILE)
    traces = [directory / trace_name(rank) for rank in range(ranks)]
    answer = analyse(read_traces(traces), run=run, found=found, measured=measured, recompilations=compiled, notes=note)
    _record(answer, found, Path(out))
    return answer


def profile_traces(traces: Iterable[str | Path], run: Run | None = None) -> Profile:
    """The analysis of traces, one file per rank or many ranks in one. `run`: what they are traces of; the planner then
    says what other choices would gain. Raises InputError."""
    read = read_traces(traces)
    if run is None:
        return analyse(read)
    world = read[0].world or (run.cluster.gpus if isinstance(run.layout, str) else run.layout.world)
    run = resolve_layout(run, world)
    found, notes = predicted(run)
    return analyse(read, run=run, found=found, notes=notes)


def _prepare(run: Run, nproc: int | None, steps: int) -> tuple[Run, int]:
    """The Run that the ranks train: resolved, checked, and long enough."""
    ranks = nproc if nproc is not None else run.cluster.gpus if isinstance(run.layout, str) else run.layout.world
    if ranks < 1:
        raise InputError(f"--nproc {ranks}: at least 1 rank is needed")
    if ranks > run.cluster.gpus_per_node and nproc is None:
        raise InputError(
            f"this Run needs {ranks} ranks, more than the {run.cluster.gpus_per_node} of one node: give --nproc, or "
            "trace it where it runs and give the traces with --trace"
        )
    needed = WARM_UP + 2 * steps + 1
    recipe = run.recipe.model_copy(update={"steps": needed, "tokens": None})
    run = resolve_layout(run.replace(recipe=recipe), ranks)
    require_trainable(run, ranks)
    check_vocabulary(open_data(resolve_data(run.recipe.data)), run.model.vocabulary)
    return run, ranks


def _measured(path: Path) -> tuple[Measured, list[Recompilation]]:
    data = json.loads(path.read_text())
    steps: list[dict[str, Any]] = data["steps"]

    def median(field: str) -> float | None:
        values = [step[field] for step in steps]
        return None if None in values else statistics.median(values)

    measured = Measured(
        step_seconds=median("step_seconds") or 0.0,
        tokens_per_second=median("tokens_per_second") or 0.0,
        mfu=median("mfu"),
        hfu=median("hfu"),
        input_fraction=median("data_wait_fraction") or 0.0,
        peak_memory_gib=steps[-1]["peak_memory_gib"],
    )
    compiled = [Recompilation(name, why or "the first time", seconds) for name, why, _, seconds in data["compilations"]]
    return measured, compiled


def _record(answer: Profile, found: Found | None, out: Path) -> None:
    """One line: prediction and measurement of the same Run, and of the parts of its step, as traced."""
    assert answer.run is not None and answer.measured is not None
    measured = answer.measured
    live = measured.peak_memory_gib if answer.chip else None  # on a CPU it is the whole process
    line = line_of("profile", answer.run, found, step_seconds=measured.step_seconds, live_gib=live)
    line["predicted"]["parts_seconds"] = {part: pair[0] for part, pair in answer.comparison.items()}
    line["measured"]["traced_parts_seconds"] = {part: pair[1] for part, pair in answer.comparison.items()}
    line["measured"] |= {"mfu": measured.mfu, "rank": answer.critical}
    append(out, line)
