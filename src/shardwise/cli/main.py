"""The command line. Exit codes: 0 done, 1 the answer is no, 2 the input is wrong, 3 it broke, 4 stopped early."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardwise import __version__
from shardwise.cli import checkpoint, data
from shardwise.cli.calibrate import calibrate
from shardwise.cli.check import check
from shardwise.cli.compare import compare, whatif
from shardwise.cli.doctor import doctor
from shardwise.cli.explain import explain
from shardwise.cli.generate import generate
from shardwise.cli.overrides import split_overrides
from shardwise.cli.plan import plan
from shardwise.cli.profile import profile
from shardwise.cli.rehearse import rehearse
from shardwise.cli.train import RUN_FIELDS, train
from shardwise.cli.verify import verify
from shardwise.spec import InputError

# Verbs that accept --recipe.steps 40 and the like
_TAKE_A_RUN = {"train", "explain", "whatif", "check", "verify", "rehearse", "profile", "doctor"}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(epilog=RUN_FIELDS)(train)
app.command()(plan)
app.command(epilog=RUN_FIELDS)(explain)
app.command(epilog=RUN_FIELDS)(whatif)
app.command()(compare)
app.command(epilog=RUN_FIELDS)(check)
app.command(epilog=RUN_FIELDS)(verify)
app.command(epilog=RUN_FIELDS)(rehearse)
app.command(epilog=RUN_FIELDS)(profile)
app.command(epilog=RUN_FIELDS)(doctor)
app.command()(calibrate)
app.command()(generate)
app.add_typer(data.app, name="data", help="Token shards.")
app.add_typer(checkpoint.app, name="checkpoint", help="What a run has saved; to and from Hugging Face.")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Pick the layout of a pre-training run, train it, and measure what happened."""
    if context.obj and context.invoked_subcommand not in _TAKE_A_RUN:
        raise InputError(f"--{context.obj[0][0]} is a field of a Run, and {context.invoked_subcommand} takes none")
    if version:
        print(__version__)
        raise typer.Exit


def main(words: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        rest, overrides = split_overrides(sys.argv[1:] if words is None else words)
        app(rest, prog_name="shardwise", obj=overrides)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
