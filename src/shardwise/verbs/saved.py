"""What a run directory holds: its checkpoints, the Run that saved one, the tokenizer that goes with it. No torch."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoints.manifest import Entry, list_checkpoints, newest_complete, verify
from shardwise.data import Tokenizer, load_tokenizer, open_data, resolve_data
from shardwise.spec import InputError, Run
from shardwise.spec.noun import nearest

TOKENIZER = "tokenizer.json"


def checkpoints_of(run_dir: str | Path) -> Path:
    """The directory of a run's checkpoints, which may be empty or absent. Raises InputError where there is no run."""
    run_dir = Path(run_dir)
    if run_dir.is_dir():
        return run_dir / "checkpoints"
    near = None
    if run_dir.parent.is_dir():
        near = nearest(run_dir.name, [path.name for path in run_dir.parent.iterdir() if path.is_dir()])
    raise InputError(f"{run_dir}: no such directory" + (f"; did you mean {run_dir.parent / near}?" if near else ""))


def usable_checkpoint(run_dir: str | Path, step: int | None = None) -> tuple[Path, Run]:
    """The checkpoint of `step`, or the newest one that is complete, and its Run; all hashes verified.

    Raises InputError saying what is there instead.
    """
    directory = checkpoints_of(run_dir)
    skipped: list[str] = []
    if step is None:
        entry = newest_complete(directory, say=skipped.append)
    else:
        entry = _checkpoint_of(directory, step)
        reason = entry.reason or verify(entry)
        if reason:
            raise InputError(f"{entry.path}: cannot be used: {reason}")
    if entry is None or entry.checkpoint is None:
        raise InputError("\n".join([f"{directory}: holds no complete checkpoint; train first", *skipped]))
    return entry.path, Run.load(entry.checkpoint.run, str(entry.path))


def _checkpoint_of(directory: Path, step: int) -> Entry:
    entries = list_checkpoints(directory)
    for entry in entries:
        if entry.step == step:
            return entry
    there = ", ".join(str(entry.step) for entry in reversed(entries)) or "none"
    raise InputError(f"{directory}: holds no checkpoint of step {step}; what is there: {there}")


def tokenizer_of(checkpoint: Path, run: Run) -> Tokenizer:
    """The tokenizer of the data that a checkpoint was trained on, or that was imported with its weights.

    Raises InputError where it is gone.
    """
    if (checkpoint / TOKENIZER).is_file():
        return load_tokenizer(checkpoint / TOKENIZER)
    if checkpoint.name == "step-00000000":
        raise InputError(f"{checkpoint}: its tokenizer is unknown: the weights were imported without a {TOKENIZER}")
    try:
        return open_data(resolve_data(run.recipe.data)).tokenizer
    except InputError as error:
        raise InputError(f"{checkpoint}: its tokenizer is unknown, because it stands with the data: {error}") from None
