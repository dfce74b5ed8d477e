"""What must be right before a single rank starts: checked without torch, so that a mistake costs half a second."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoints.manifest import Entry, list_checkpoints
from shardwise.data import Data, check_vocabulary, open_data, resolve_data
from shardwise.spec import InputError, Model, Run
from shardwise.spec.trainable import require_trainable
from shardwise.verbs.resolve import resolve_layout

# What a continued run may change beside its layout and cluster: how long it trains.
_LENGTH = ("steps", "tokens")


@dataclass(frozen=True)
class Job:
    """A Run that can be trained on `world` ranks into `out`."""

    run: Run
    out: Path
    data: Data
    world: int

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


def prepare_job(run: Run, out: Path, world: int) -> Job:
    """Resolve and check everything that needs no device. Raises InputError."""
    run = resolve_layout(run, world)
    require_trainable(run, world)
    _require_writable(out)
    data = open_data(resolve_data(run.recipe.data))
    check_vocabulary(data, run.model.vocabulary)
    job = Job(run, out, data, world)
    for entry in list_checkpoints(job.checkpoints):
        if entry.checkpoint:
            require_same_run(job, entry)
            break
    return job


def require_same_run(job: Job, entry: Entry) -> None:
    """A run is continued only as itself: same model, recipe and data. Layout and cluster may differ, and it may be
    longer. From imported weights (step 0) any run of the same model starts. Raises InputError naming each difference.
    """
    checkpoint = entry.checkpoint
    assert checkpoint is not None
    saved, wanted = Run.load(checkpoint.run), job.run
    if checkpoint.step == 0:
        _require_same_model(job, saved.model)
        return
    found = [
        f"{path} was {before!r} and is now {after!r}"
        for noun in ("model", "recipe")
        for path, before, after in changes(getattr(saved, noun).dump(), getattr(wanted, noun).dump(), noun)
        if path not in {"model.name", *(f"recipe.{field}" for field in _LENGTH)}
    ]
    if wanted.recipe.total_steps < saved.recipe.total_steps:
        found.append(f"it had {saved.recipe.total_steps} steps and now has {wanted.recipe.total_steps}")
    if checkpoint.data != job.data.fingerprint:
        found.append(f"recipe.data {wanted.recipe.data!r} holds other tokens than before")
    if found:
        raise InputError(
            f"{job.out} holds a run that reached step {checkpoint.step}, and it can only be continued with the same "
            f"model, recipe and data (a longer run and another layout are fine):\n  "
            + "\n  ".join(found)
            + "\nUse another --out for a new run."
        )


def _require_same_model(job: Job, saved: Model) -> None:
    found = [
        f"{path} is {before!r} there and {after!r} here"
        for path, before, after in changes(saved.dump(), job.run.model.dump(), "model")
        if path != "model.name"
    ]
    if found:
        raise InputError(
            f"{job.out} holds imported weights of another model:\n  "
            + "\n  ".join(found)
            + "\nGive the config.json that they came with as `model`, or use another --out."
        )


def changes(before: Any, after: Any, path: str) -> list[tuple[str, Any, Any]]:
    """(path, before, after) of every field in which two nested dumps differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [change for key in keys for change in changes(before.get(key), after.get(key), f"{path}.{key}")]
    return [] if before == after else [(path, before, after)]


def _require_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror or error}") from None


def store_run(job: Job) -> None:
    """Write the resolved Run beside its results."""
    temporary = job.out / "run.yaml.tmp"
    temporary.write_text(job.run.to_yaml())
    temporary.replace(job.out / "run.yaml")
