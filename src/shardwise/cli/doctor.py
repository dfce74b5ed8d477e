"""`shardwise doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.verb import verb

if TYPE_CHECKING:
    from shardwise.spec import Run


@verb
def doctor(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A preset, the path of a config.json, or a Run file.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="The chip: h100-sxm, a100-80-sxm, …")] = None,
    gpus: Annotated[int | None, typer.Option(help="How many.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of one sequence.")] = None,
    batch_tokens: Annotated[str | None, typer.Option(help="Tokens of one optimizer step, such as 4M.")] = None,
    tokens_per_second_per_gpu: Annotated[float | None, typer.Option(help="What one GPU of the run reaches.")] = None,
    oom: Annotated[Path | None, typer.Option(help="A log with a CUDA out-of-memory message.")] = None,
    snapshot: Annotated[Path | None, typer.Option(help="A file of torch.cuda.memory._dump_snapshot().")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> int:
    """Where the missing MFU or memory of a run most probably is, and what to try, in order.

    The layout is given as in a Run file: --layout.dp_shard 64 --layout.recompute full."""
    from shardwise.verbs.doctor import doctor as consult

    run = _run(model, gpu, gpus, seq, batch_tokens, context.obj)
    answer = consult(run, tokens_per_second_per_gpu=tokens_per_second_per_gpu, oom=oom, snapshot=snapshot)
    if as_json:
        json.dump(answer.dump(), sys.stdout)
        print()
    else:
        from shardwise.report.doctor_text import doctor_lines

        print("\n".join(doctor_lines(answer)))
    return 0


def _run(
    model: str | None,
    gpu: str | None,
    gpus: int | None,
    seq: int | None,
    batch_tokens: str | None,
    overrides: list[tuple[str, str]],
) -> Run | None:
    """The Run that the command line describes; None where no model is named. Raises InputError."""
    from shardwise.spec import InputError, load_run
    from shardwise.verbs.predicted import fill_cluster

    if model is None:
        if overrides or gpu or gpus:
            raise InputError("MODEL is missing: without it no layout can be compared with")
        return None
    if gpu is None and gpus is None and Path(model).suffix in (".yaml", ".yml"):
        return load_run(model, overrides)
    if gpu is None or gpus is None:
        raise InputError(f"{'--gpu' if gpu is None else '--gpus'} is missing (or give a Run file instead of a model)")
    recipe: dict[str, Any] = {"sequence": seq or 8192}
    recipe |= {} if batch_tokens is None else {"batch_tokens": batch_tokens}
    run = load_run({"model": model, "cluster": {"gpu": gpu, "gpus": gpus}, "recipe": recipe}, overrides)
    if not {path for path, _ in overrides} & {"layout", "layout.dp_shard", "layout.dp_replicate"}:
        run, _ = fill_cluster(run)
    return run
