"""`verify`: does a Run's layout train the same model as one process? Both are trained, small, on this machine's CPU."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.launching.local import launch
from shardwise.planner.parameters import count_parameters
from shardwise.spec import InputError, Layout, Model, Run, load_run
from shardwise.spec.huggingface import CONFIG, load_model_config
from shardwise.spec.legality import illegal
from shardwise.spec.memory import GIB
from shardwise.spec.noun import unknown
from shardwise.spec.numbers import human
from shardwise.spec.trainable import untrainable
from shardwise.verbs.job import changes
from shardwise.verbs.machine import memory_bytes
from shardwise.verbs.resolve import resolve_layout
from shardwise.verbs.saved import usable_checkpoint
from shardwise.verbs.scaled import one_process, scale_down
from shardwise.verbs.unfinished import Unfinished

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
EXACT = ("initial weights", "tokens")  # of these no difference is rounding
WORKER = (sys.executable, "-m", "shardwise.verbs.verify_rank")

_BYTES = {"fp64": 8, "fp32": 4}
# Of a parameter on every rank, at most: itself, gradient, momentum, its part before and after, and the whole ones that
# they are compared with.
_COPIES = 7
_MOST_MEMORY = 0.8  # of this machine's


@dataclass(frozen=True)
class Quantity:
    """The largest absolute difference between the layout and one process. None: there is nothing to subtract, since
    something is missing, not a number, or (tokens) simply other."""

    difference: float | None
    tolerance: float

    @property
    def same(self) -> bool:
        return self.difference is not None and self.difference <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """`given` is the user's Run with its layout resolved, `scaled` the one that was trained."""

    given: Run
    scaled: Run
    quantities: dict[str, Quantity]

    @property
    def layout(self) -> Layout:
        return self.given.fixed_layout

    @property
    def same(self) -> bool:
        return all(quantity.same for quantity in self.quantities.values())

    def dump(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "layout": self.layout.dump(),
            "scaled": self.scaled.dump(),
            "precision": self.scaled.recipe.precision.name,
            "quantities": {
                name: {"difference": item.difference, "tolerance": item.tolerance, "same": item.same}
                for name, item in self.quantities.items()
            },
            "same": self.same,
        }


def verify(
    run: Run | str | Path,
    *,
    nproc: int = 8,
    precision: str = "fp64",
    checkpoint: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> Verification:
    """Train a Run, scaled down to at most `nproc` CPU ranks, for 3 SGD steps, and compare it with one process.

    checkpoint: a run directory, or one of Hugging Face weights. Its model replaces the Run's, is not scaled down, and
    starts from these weights. Raises InputError, and Unfinished where a rank failed. Main thread only.
    """
    run = run if isinstance(run, Run) else load_run(run)
    if precision not in TOLERANCE:
        raise InputError(f"--precision: {unknown('precision', precision, TOLERANCE)}")
    if nproc < 1:
        raise InputError(f"--nproc {nproc}: at least 1 rank is needed")
    weights, model = _weights(checkpoint) if checkpoint is not None else (None, None)
    run = run.replace(model=model) if model else run
    run = resolve_layout(run, run.cluster.gpus if isinstance(run.layout, str) else run.layout.world)
    layout = run.fixed_layout
    if reasons := [*illegal(run.model, layout, run.recipe), *untrainable(run.model)]:
        raise InputError("\n".join(reasons))
    scaled = scale_down(run, nproc, precision, model)
    if model:
        _require_small(model, scaled.fixed_layout.world, precision)
    for line in describe(run, scaled):
        say(line)

    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as directory:
        work = Path(directory)
        _train(work, "one-process", one_process(scaled), weights, say)
        _train(work, "layout", scaled, weights, say)
        differences = json.loads((work / "differences.json").read_text())
    tolerances = {name: 0.0 if name in EXACT else TOLERANCE[precision] for name in differences}
    return Verification(run, scaled, {name: Quantity(differences[name], tolerances[name]) for name in differences})


def describe(given: Run, scaled: Run) -> list[str]:
    """What was scaled to what, and who stands where. Imports torch."""
    from shardwise.parallel.mesh import mesh_table

    recipes = [
        {name: getattr(run.recipe, name) for name in ("sequence", "batch_tokens")}
        | {"precision": run.recipe.precision.name, "optimizer": run.recipe.optimizer.name}
        for run in (given, scaled)
    ]
    pairs = [
        ("model", given.model.dump(), scaled.model.dump()),
        ("layout", given.fixed_layout.dump(), scaled.fixed_layout.dump()),
        ("recipe", *recipes),
    ]
    rows = [
        (field, _text(before), _text(after))
        for noun, old, new in pairs
        for field, before, after in changes(old, new, noun)
        if field != "model.name"
    ]
    widths = [max(len(row[column]) for row in [*rows, ("scaled down", "yours", "")]) for column in (0, 1)]
    lines = [f"{field:<{widths[0]}}  {before:>{widths[1]}}  {after}" for field, before, after in rows]
    head = f"{'scaled down':<{widths[0]}}  {'yours':>{widths[1]}}  here"
    size = f"{given.model.name}: {human(count_parameters(scaled.model).total)} parameters here"
    return [size, head, *lines, mesh_table(scaled.fixed_layout)]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} numbers"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _train(work: Path, name: str, run: Run, weights: Path | None, say: Callable[[str], None]) -> None:
    """Train on as many ranks as the Run has; they leave their results in `work`. Raises Unfinished."""
    (work / f"{name}.yaml").write_text(run.to_yaml())
    ranks = run.fixed_layout.world
    say(f"{name.replace('-', ' ')}: {run.recipe.steps} steps on {ranks} {'process' if ranks == 1 else 'processes'}")
    command = [*WORKER, str(work), name, *([str(weights)] if weights else [])]
    code = launch(command, ranks, say=say, how_to_continue="stopped before a verdict")
    if code:
        raise Unfinished("verify", 2 if code == 2 else 3)


def _weights(checkpoint: str | Path) -> tuple[Path, Model]:
    """Where the weights are, and their model. Raises InputError."""
    path = Path(checkpoint).absolute()
    if (path / CONFIG).is_file():
        return path, load_model_config(path)
    try:
        found, run = usable_checkpoint(path)
    except InputError as error:
        raise InputError(f"--checkpoint: {error}") from None
    return found, run.model


def _require_small(model: Model, ranks: int, precision: str) -> None:
    """Whether whole copies of a model that is not scaled down fit into this machine's memory. Raises InputError."""
    parameters = count_parameters(model).total
    need = parameters * _BYTES[precision] * _COPIES * ranks
    memory = memory_bytes()
    if memory is not None and need > _MOST_MEMORY * memory:
        raise InputError(
            f"--checkpoint: {model.name} has {human(parameters)} parameters, and comparing them on {ranks} ranks in "
            f"{precision} may take {need / GIB:.0f} GiB of this machine's {memory / GIB:.0f} GiB; nearest: "
            f"{human(int(_MOST_MEMORY * memory / (need / parameters)))} parameters"
            + (", or twice that with --precision fp32" if precision == "fp64" else "")
        )
