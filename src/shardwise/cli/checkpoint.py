"""`shardwise checkpoint …`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.verb import verb

if TYPE_CHECKING:
    from shardwise.verbs.checkpoint import SavedCheckpoint

app = typer.Typer(no_args_is_help=True)

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="What `train` wrote with --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("list")
@verb
def list_(run_dir: RunDir, as_json: Json = False) -> int:
    """Show a run's checkpoints, newest first."""
    import shardwise

    _show(shardwise.list_checkpoints(run_dir), as_json, good="complete")
    return 0


@app.command()
@verb
def verify(
    run_dir: RunDir,
    step: Annotated[int | None, typer.Option(help="Only this one. Default: all.")] = None,
    as_json: Json = False,
) -> int:
    """Compare every byte of a run's checkpoints with their hashes. Exit code 1 where one cannot be used."""
    import shardwise

    checkpoints = shardwise.verify_checkpoint(run_dir, step=step)
    _show(checkpoints, as_json, good="verified")
    return 1 if any(checkpoint.reason for checkpoint in checkpoints) else 0


@app.command()
@verb
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Option("-o", "--out", help="The directory to write.")],
    to: Annotated[str, typer.Option(help="The form: hf, which transformers opens with from_pretrained.")] = "hf",
    step: Annotated[int | None, typer.Option(help="Default: the newest that is complete.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32 or bf16.")] = "fp32",
    max_shard_size: Annotated[str, typer.Option(help="Largest file in bytes, such as 5G.")] = "5G",
) -> int:
    """Write a checkpoint as a Hugging Face model, one parameter at a time."""
    import shardwise

    shardwise.export_checkpoint(run_dir, out, to=to, step=step, dtype=dtype, max_shard_size=max_shard_size)
    return 0


@app.command("import")
@verb
def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="config.json and safetensors.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The run directory, to be given to `train`.")],
) -> int:
    """Write a Hugging Face model's weights as step 0 of a run, from which `train` starts."""
    import shardwise

    shardwise.import_checkpoint(source, out)
    return 0


def _show(checkpoints: list[SavedCheckpoint], as_json: bool, good: str) -> None:
    if as_json:
        print(json.dumps({"checkpoints": [asdict(checkpoint) for checkpoint in checkpoints]}, indent=2))
        return
    if not checkpoints:
        print("no checkpoints")
    for one in checkpoints:
        about = f"{one.tokens:,} tokens, {one.world} ranks, {one.size_gib:.3g} GiB: " if one.tokens is not None else ""
        print(f"step {one.step}: {about}{one.reason or good}")
