"""`shardwise explain`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb


@verb
def explain(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The Run to explain.")],
    rank: Annotated[int | None, typer.Option(help="Of the world. Default: the one with the fullest memory.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the rank's timeline as JSON for ui.perfetto.dev.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the pipeline schedule as an SVG file (pp > 1).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> int:
    """What fills the memory, where the time goes, what binds, and what each other choice would change.

    Exit code 1 where the Run does not fit."""
    from shardwise.cli.output import write_whole
    from shardwise.spec import InputError, load_run
    from shardwise.verbs.explain import explain as make_explanation

    answer = make_explanation(load_run(run, context.obj), rank=rank)
    if picture and not answer.schedule:
        raise InputError(f"--picture {picture}: without a pipeline (layout.pp 1) there is no schedule to draw")
    if out:
        from shardwise.timeline import to_chrome

        write_whole(out, json.dumps(to_chrome(answer.timeline)), "--out")
    if picture:
        from shardwise.timeline import schedule_svg

        layout = answer.candidate.layout
        title = f"{layout.schedule}, {layout.pp} ranks, {answer.micro_batches} micro-batches"
        write_whole(picture, schedule_svg(answer.schedule, title=title), "--picture")
    if as_json:
        json.dump(answer.dump(), sys.stdout)
        print()
    else:
        from shardwise.report.explanation_text import explanation_text

        print(explanation_text(answer))
    return 1 if answer.candidate.verdict == "oom" else 0
