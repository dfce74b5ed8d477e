"""`shardwise check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb


@verb
def check(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The Run to check.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> int:
    """Is a Run legal, does it fit, and is it advisable? One line per finding, with the figure behind it.

    Exit code 1 where it is illegal, does not fit, takes over 5 % longer than it need, or is at risk; smaller advice
    only warns."""
    from shardwise.spec import load_run
    from shardwise.verbs.check import check as make_check

    answer = make_check(load_run(run, context.obj))
    if as_json:
        json.dump(answer.dump(), sys.stdout)
        print()
        return 0 if answer.ok else 1
    for item in answer.findings:
        print(f"{item.level}: {item.topic}: {item.text} [{item.source}]")
    if answer.candidate:
        time = answer.candidate.time
        print(f"{answer.candidate.verdict}; step {time.step_seconds:.3f} s, MFU {time.mfu:.1%}")
    for note in answer.notes:
        print(f"note: {note}")
    print("ok" if answer.ok else "not ok")
    return 0 if answer.ok else 1
