"""`shardwise train`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb

RUN_FIELDS = "Any field of the Run can be set: --recipe.steps 40 --layout.dp_shard 2 (docs/run-file.md)."


@verb
def train(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The Run to train, or to continue.")],
    out: Annotated[Path | None, typer.Option(help="Where results go. Default: runs/ and the file's name.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine. Default: what the Run asks for.")] = None,
    log: Annotated[
        list[str] | None, typer.Option(help="Feed a dashboard: tensorboard, wandb or trackio. Repeatable.")
    ] = None,
    expect: Annotated[
        Path | None, typer.Option(help="Bands for the validation loss; exit code 1 if one is missed.")
    ] = None,
) -> int:
    """Train. The same command with the same --out continues where it stopped."""
    from shardwise.spec import load_run

    out = out or Path("runs") / run.stem
    log_names = tuple(log or ())
    if "RANK" in os.environ:  # started by our launcher, torchrun or Slurm: this is one rank
        from shardwise.launching import run_worker
        from shardwise.report.loggers import require_loggers

        overrides = list(context.obj)

        def rank() -> int:
            require_loggers(log_names)
            loaded = load_run(run, overrides)
            from shardwise.verbs.worker import train_rank

            return train_rank(loaded, out, log_names, expect)

        return run_worker(rank)

    import shardwise
    from shardwise.launching import stop_signals_held

    command = shlex.join(["shardwise", *sys.argv[1:]])
    with stop_signals_held():  # a stop that comes before the ranks do is acted on by the launcher
        return shardwise.train(
            load_run(run, context.obj),
            out=out,
            nproc=nproc,
            log=log_names,
            expect=expect,
            how_to_continue=f"continue with: {command}",
        )
