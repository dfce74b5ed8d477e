"""`shardwise compare` and `shardwise whatif`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.verb import verb

if TYPE_CHECKING:
    from shardwise.planner.comparison import Comparison

_AS_JSON = typer.Option("--json", help="Print one JSON document instead of the table.")


@verb
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.yaml", help="A Run.")],
    second: Annotated[Path, typer.Argument(metavar="B.yaml", help="The Run to compare with it.")],
    as_json: Annotated[bool, _AS_JSON] = False,
) -> int:
    """The predictions of two Runs side by side."""
    from shardwise.spec import load_run
    from shardwise.verbs.compare import compare as make_comparison

    titles = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    return _show(make_comparison(load_run(first), load_run(second), titles=titles), as_json)


@verb
def whatif(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The Run to start from.")],
    as_json: Annotated[bool, _AS_JSON] = False,
) -> int:
    """What other values of a Run's fields would change: --cluster.gpus 128 --layout.tp 2.

    Where the changed layout does not fill the cluster, dp_shard makes up for it, unless it is given."""
    from shardwise.verbs.compare import whatif as make_comparison

    return _show(make_comparison(run, context.obj), as_json)


def _show(comparison: Comparison, as_json: bool) -> int:
    if as_json:
        json.dump(comparison.dump(), sys.stdout)
        print()
    else:
        from rich.console import Console

        from shardwise.report.comparison_table import print_comparison

        print_comparison(comparison, Console(width=None if sys.stdout.isatty() else 160))
    return 0
