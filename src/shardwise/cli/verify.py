"""`shardwise verify`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb


@verb
def verify(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The Run whose layout is in question.")],
    nproc: Annotated[int, typer.Option(help="The most ranks, all of them CPU processes of this machine.")] = 8,
    precision: Annotated[str, typer.Option(help="fp64 (allows differences of 1e-10) or fp32 (1e-5).")] = "fp64",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Start from these weights, of a run or of Hugging Face; the model is theirs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> int:
    """Does a Run's layout train the same model as one process? Trains both, scaled down, on this machine's CPU.

    Exit code 1 where it does not."""
    from shardwise.spec import load_run
    from shardwise.verbs.unfinished import Unfinished
    from shardwise.verbs.verify import verify as make_verification

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    try:
        answer = make_verification(
            load_run(run, context.obj), nproc=nproc, precision=precision, checkpoint=checkpoint, say=say
        )
    except Unfinished as unfinished:  # the ranks have said why
        return unfinished.code
    if as_json:
        json.dump(answer.dump(), sys.stdout)
        print()
        return 0 if answer.same else 1
    print(f"{'largest difference in':<22}  {'found':>8}  allowed")
    for name, item in answer.quantities.items():
        found = "-" if item.difference is None else f"{item.difference:.1e}"
        print(f"{name:<22}  {found:>8}  {item.tolerance:.0e}  {'the same' if item.same else 'NOT the same'}")
    print("the same model" if answer.same else "NOT the same model")
    return 0 if answer.same else 1
