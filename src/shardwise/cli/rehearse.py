"""`shardwise rehearse`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb


@verb
def rehearse(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The Run to rehearse.")],
    rank: Annotated[str, typer.Option(help="A rank of the world; fullest, or all-distinct.")] = "fullest",
    device: Annotated[str, typer.Option(help="cpu: fake tensors; cuda: real kernels on one GPU.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Of which the last is reported.")] = 2,
    imbalance: Annotated[
        float, typer.Option(help="Token copies that this rank's experts receive, over the mean (cpu).")
    ] = 1.0,
    pictures: Annotated[
        Path | None, typer.Option("-o", help="A directory for the timeline of memory: SVG, and a snapshot.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A run directory: its predictions.jsonl gets a line a rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> int:
    """Run the real training step of any rank of any cluster, without the cluster: its memory, by part.

    Exit code 1 where it does not fit."""
    from shardwise.report.rehearsal_text import rehearsal_text
    from shardwise.spec import load_run
    from shardwise.verbs.rehearse import rehearse as make_rehearsal

    answer = make_rehearsal(
        load_run(run, context.obj),
        rank=rank,
        device=device,
        steps=steps,
        imbalance=imbalance,
        pictures=pictures,
        out=out,
    )
    if as_json:
        json.dump(answer.dump(), sys.stdout)
        print()
    else:
        print(rehearsal_text(answer.dump()))
    return 1 if answer.verdict == "oom" else 0
