"""`shardwise profile`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb

_RUNS = (".yaml", ".yml")


@verb
def profile(
    context: typer.Context,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN.yaml] [FILE…]", help="A Run; with --trace, further traces.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Traces that exist: of PyTorch's profiler (.json, .json.gz), or of Nsight Systems (.sqlite)."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=50, help="How many steps to trace, after two to warm up.")] = 5,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine. Default: what the Run asks for.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where traces and results go. Default: runs/ and the name.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one offline page.")] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Write predicted and measured tracks side by side, for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> int:
    """Where the time of a training step goes, the one bottleneck, and what would change it.

    RUN.yaml trains a few steps under PyTorch's profiler; --trace analyses traces of any trainer."""
    from shardwise.spec import InputError, load_run

    runs = [path for path in files or [] if path.suffix in _RUNS]
    traces = [*(trace or []), *(path for path in files or [] if path.suffix not in _RUNS)]
    if len(runs) > 1:
        raise InputError(f"{runs[1]}: one Run at a time")
    if not trace and traces:
        raise InputError(f"{traces[0]}: a Run is a .yaml file; traces are given with --trace")
    if not runs and not traces:
        raise InputError("give a Run to profile, or traces with --trace")
    run = load_run(runs[0], context.obj) if runs else None
    if context.obj and not runs:
        raise InputError(f"--{context.obj[0][0]} is a field of a Run, and none is given")
    if traces:
        from shardwise.verbs.profile import profile_traces

        answer = profile_traces(traces, run)
    else:
        from shardwise.verbs.profile import profile as make_profile
        from shardwise.verbs.unfinished import Unfinished

        def say(line: str) -> None:
            print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

        assert run is not None
        try:
            answer = make_profile(run, out=out or Path("runs") / runs[0].stem, steps=steps, nproc=nproc, say=say)
        except Unfinished as unfinished:  # the ranks have said why
            return unfinished.code
    if html:
        from shardwise.cli.output import write_whole
        from shardwise.report.profile_page import render_profile

        write_whole(html, render_profile(answer), "--html")
    if chrome:
        from shardwise.cli.output import write_whole
        from shardwise.report.profile_page import chrome_document

        write_whole(chrome, json.dumps(chrome_document(answer)), "--chrome")
    if as_json:
        json.dump(answer.dump(), sys.stdout)
        print()
    else:
        from shardwise.report.profile_text import profile_lines

        print("\n".join(profile_lines(answer)))
    return 0
