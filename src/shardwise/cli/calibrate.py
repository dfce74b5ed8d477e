"""`shardwise calibrate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb


@verb
def calibrate(
    nproc: Annotated[int, typer.Option(help="Ranks: one for each GPU, or CPU processes. From 2 on, links too.")] = 1,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the Cluster file here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Cluster as one JSON document.")] = False,
) -> int:
    """Measure what this machine reaches, kernel by kernel: a Cluster file that `plan --cluster FILE` takes.

    About two minutes on a GPU."""
    from shardwise.cli.output import write_whole
    from shardwise.report.calibration_text import summary
    from shardwise.spec import InputError
    from shardwise.verbs.calibrate import calibrate as make_calibration
    from shardwise.verbs.calibrate import cluster_yaml
    from shardwise.verbs.unfinished import Unfinished

    if out is not None and not out.absolute().parent.is_dir():  # said before two minutes are spent
        raise InputError(f"-o {out}: {out.absolute().parent} is no directory")
    try:
        cluster = make_calibration(nproc=nproc, quick=quick, say=lambda line: print(line, file=sys.stderr))
    except Unfinished as unfinished:  # the ranks have said why
        return unfinished.code
    if out is not None:
        write_whole(out, cluster_yaml(cluster), "-o")
    if as_json:
        json.dump(cluster.dump(), sys.stdout)
        print()
        return 0
    print("\n".join(summary(cluster)))
    if out is not None:
        print(f"written to {out}: `shardwise plan MODEL --cluster {out}`")
    return 0
