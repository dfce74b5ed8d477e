"""`checkpoint list|verify|export|import`: what a run has saved, and the way to and from Hugging Face."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoints import manifest
from shardwise.checkpoints.manifest import Entry, step_name
from shardwise.data import Tokenizer
from shardwise.spec import InputError, Run
from shardwise.spec.huggingface import CONFIG, load_model_config, model_config
from shardwise.spec.noun import unknown
from shardwise.spec.numbers import parse_count
from shardwise.verbs.saved import TOKENIZER, checkpoints_of, tokenizer_of, usable_checkpoint


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """One directory of a run's checkpoints. `reason` says why it cannot be used, and is None where it can."""

    step: int
    path: str
    tokens: int | None
    world: int | None  # ranks that saved it
    size_gib: float | None
    reason: str | None


def list_checkpoints(run_dir: str | Path) -> list[SavedCheckpoint]:
    """The checkpoints of a run, newest first. Files are counted and measured, not read. Raises InputError."""
    return [_saved(entry, entry.reason) for entry in manifest.list_checkpoints(checkpoints_of(run_dir))]


def verify_checkpoint(run_dir: str | Path, *, step: int | None = None) -> list[SavedCheckpoint]:
    """As `list_checkpoints`, of one step or of all, and every byte is compared with the manifest's hashes.

    Raises InputError where there is nothing to verify.
    """
    directory = checkpoints_of(run_dir)
    entries = [entry for entry in manifest.list_checkpoints(directory) if step in (None, entry.step)]
    if not entries:
        raise InputError(f"{directory}: holds no checkpoint" + ("" if step is None else f" of step {step}"))
    return [_saved(entry, manifest.verify(entry)) for entry in entries]


def export_checkpoint(
    run_dir: str | Path,
    out: str | Path,
    *,
    to: str = "hf",
    step: int | None = None,
    dtype: str = "fp32",
    max_shard_size: int | str = "5G",
    say: Callable[[str], None] = print,
) -> Path:
    """Write a checkpoint of any layout as a directory that transformers opens with `from_pretrained`.

    Default: the newest complete one. The weights pass through host memory one parameter at a time. dtype: fp32 or bf16;
    max_shard_size: bytes of one file. `out` appears when all of it is written. Raises InputError.
    """
    if to != "hf":
        raise InputError(f"--to: {unknown('format', to, ['hf'])}")
    if dtype not in ("fp32", "bf16"):
        raise InputError(f"--dtype: {unknown('dtype', dtype, ['fp32', 'bf16'])}")
    limit = _positive("--max-shard-size", max_shard_size)
    out = Path(out)
    _require_free(out)
    checkpoint, run = usable_checkpoint(run_dir, step)
    config = model_config(run.model) | {"torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype]}
    tokenizer = _tokenizer_or_none(checkpoint, run, say)
    # Without these, transformers takes the special tokens of its own default vocabulary.
    end = tokenizer.end_of_document if tokenizer else None
    config |= {"bos_token_id": end, "eos_token_id": end}

    from shardwise.checkpoints.stream import TensorReader
    from shardwise.model.huggingface import NAMINGS, parameter_shapes, their_names, their_shapes, to_theirs
    from shardwise.model.weight_files import write_weights

    naming, ours = NAMINGS[config["model_type"]], parameter_shapes(run.model)
    reader = TensorReader(checkpoint)
    for name, shape in ours.items():
        if reader.shapes.get(f"model.{name}") != shape:
            raise InputError(f"{checkpoint}: {name} is not there in the shape that its model needs: {list(shape)}")
    shapes = {
        their: shape
        for name, own in ours.items()
        for their, shape in zip(
            their_names(run.model, naming, name), their_shapes(run.model, naming, name, own), strict=True
        )
    }

    def tensors() -> Iterator[Any]:
        for name in ours:
            yield from to_theirs(run.model, naming, name, reader.load(f"model.{name}"))

    with _appearing(out) as directory:
        write_weights(directory, shapes, tensors(), dtype=dtype, max_shard_bytes=limit)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer and tokenizer.kind == "huggingface":
            (directory / TOKENIZER).write_bytes(tokenizer.content)
            # Or else transformers may put the rules of the family's own tokenizer in place of those in the file.
            (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    say(f"{checkpoint} is exported to {out} ({config['model_type']}, {dtype})")
    return out


def import_checkpoint(source: str | Path, out: str | Path, *, say: Callable[[str], None] = print) -> Path:
    """Write the weights of a Hugging Face directory as step 0 of the run directory `out`; returns the checkpoint.

    `train` with the same `out` and the same model then starts from them, on any layout, with any data and recipe. The
    weights pass through host memory one parameter at a time and are stored in fp32. Raises InputError naming what is
    missing, unexpected or of another shape.
    """
    source, out = Path(source), Path(out)
    if not source.is_dir():
        raise InputError(f"{source}: no such directory; one with config.json and model.safetensors is expected")
    model = load_model_config(source)

    checkpoints = out / "checkpoints"
    if any(entry.checkpoint for entry in manifest.list_checkpoints(checkpoints)):
        raise InputError(f"{checkpoints}: holds checkpoints already; give another --out")

    from shardwise.checkpoints.stream import write_weights_only
    from shardwise.model.huggingface import NAMINGS, ImportedWeights
    from shardwise.model.weight_files import WeightFiles

    weights = ImportedWeights(model, NAMINGS[str(model_config(model)["model_type"])], WeightFiles(source))
    run = Run.load({"model": model.dump(), "cluster": {"gpu": "cpu"}, "recipe": {}})
    path = checkpoints / step_name(0)
    with _appearing(path) as directory:
        tokenizer = [Path(shutil.copy(file, directory)) for file in [source / TOKENIZER] if file.is_file()]
        write_weights_only(
            directory,
            {f"model.{name}": shape for name, shape in weights.shapes.items()},
            lambda name: weights.load(name.removeprefix("model.")),
            run=run.dump(),
            extra=tokenizer,
        )
    say(f"{source} is imported as {path}; `shardwise train` with `model: {source}` and --out {out} starts from it")
    return path


def _saved(entry: Entry, reason: str | None) -> SavedCheckpoint:
    checkpoint = entry.checkpoint
    return SavedCheckpoint(
        step=entry.step,
        path=str(entry.path),
        tokens=checkpoint.tokens if checkpoint else None,
        world=checkpoint.world if checkpoint else None,
        size_gib=sum(file.bytes for file in checkpoint.files) / 2**30 if checkpoint else None,
        reason=reason,
    )


def _tokenizer_or_none(checkpoint: Path, run: Run, say: Callable[[str], None]) -> Tokenizer | None:
    try:
        return tokenizer_of(checkpoint, run)
    except InputError as error:
        say(f"exported without a tokenizer: {error}")
        return None


def _positive(option: str, value: int | str) -> int:
    try:
        number = parse_count(value)
    except ValueError as error:
        raise InputError(f"{option} {value}: {error}") from None
    if number < 1:
        raise InputError(f"{option} {value}: at least 1 byte is needed")
    return number


def _require_free(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out}: is there already; give another directory")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its name when all is written, and is removed where anything fails."""
    out = out.absolute()
    _require_free(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        manifest.sync_directory(temporary)
        temporary.replace(out)
        manifest.sync_directory(out.parent)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
