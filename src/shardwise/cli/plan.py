"""`shardwise plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb


@verb
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A preset, or the path of a Hugging Face config.json.")],
    gpu: Annotated[str, typer.Option(help="The chip: h100-sxm, a100-80-sxm, …")],
    gpus: Annotated[int, typer.Option(help="How many.")],
    seq: Annotated[int, typer.Option(help="Tokens of one sequence.")],
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on in all, such as 1T, for the cost.")] = None,
    batch_tokens: Annotated[str | None, typer.Option(help="Tokens of one optimizer step, such as 4M.")] = None,
    provider: Annotated[str | None, typer.Option(help="Take this provider's price.")] = None,
    price: Annotated[float | None, typer.Option(help="USD per GPU-hour, instead of the dated snapshot.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Take spot and community prices.")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = 10,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a Run file with the first layout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> int:
    """Rank every legal layout: will it fit, how fast, how dear. Exit code 1 where none fits."""
    from shardwise.verbs.plan import plan as make_plan
    from shardwise.verbs.plan import run_of

    run = run_of(model, gpu=gpu, gpus=gpus, sequence=seq, tokens=tokens, batch_tokens=batch_tokens)
    answer = make_plan(run, provider=provider, price=price, spot=spot, top=top)
    if as_json:
        json.dump({key: value for key, value in answer.dump().items() if key != "run"}, sys.stdout)
        print()
    else:
        from rich.console import Console

        from shardwise.report.plan_table import print_plan

        print_plan(answer, Console(width=None if sys.stdout.isatty() else 200))
    if out:
        out.write_text(answer.run.to_yaml())
    return 0 if answer.candidates[0].verdict != "oom" else 1
