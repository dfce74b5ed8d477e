"""`shardwise plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.verb import verb


@verb
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A preset, or the path of a config.json or YAML file.")],
    seq: Annotated[int, typer.Option(help="Tokens of one sequence.")],
    gpu: Annotated[str | None, typer.Option(help="The chip: h100-sxm, a100-80-sxm, …")] = None,
    gpus: Annotated[str | None, typer.Option(help="How many; a range such as 8..1024 compares cluster sizes.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Instead of --gpu: a Cluster file, such as `calibrate` writes.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on in all, such as 1T, for the cost.")] = None,
    batch_tokens: Annotated[str | None, typer.Option(help="Tokens of one optimizer step, such as 4M.")] = None,
    budget: Annotated[float | None, typer.Option(help="Only cluster sizes that cost at most this many USD.")] = None,
    deadline: Annotated[str | None, typer.Option(help="Only cluster sizes that finish in time, such as 14d.")] = None,
    objective: Annotated[str, typer.Option(help="Order of cluster sizes: time or cost.")] = "time",
    pareto: Annotated[bool, typer.Option("--pareto", help="Only sizes that no other beats in money and time.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="The cheapest card that holds the model.")] = False,
    provider: Annotated[str | None, typer.Option(help="Take this provider's price.")] = None,
    price: Annotated[float | None, typer.Option(help="USD per GPU-hour, instead of the dated snapshot.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Take spot and community prices.")] = False,
    live_prices: Annotated[bool, typer.Option("--live-prices", help="Ask gpuhunt for today's prices.")] = False,
    precision: Annotated[str | None, typer.Option(help="Rank these together: bf16, fp8, fp4, fp16, fp32.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = 10,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a Run file with the first layout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> int:
    """Rank every legal layout: will it fit, how fast, how dear. Exit code 1 where none fits, or none within limits."""
    from shardwise.spec import InputError
    from shardwise.verbs.plan import plan as make_plan
    from shardwise.verbs.plan import run_of
    from shardwise.verbs.sweep import cheapest_to_debug, parse_sizes, sweep

    if (gpu is None) is (cluster is None):
        raise InputError("--gpu CHIP or --cluster FILE is needed" + (", not both" if gpu else ""))
    if gpus is None and cluster is None:
        raise InputError("--gpus is needed: how many")
    sizes = parse_sizes(gpus) if gpus is not None else []
    if objective not in ("time", "cost"):
        raise InputError(f"--objective {objective}: time or cost is expected")
    chips = cluster if cluster is not None else str(gpu)
    run = run_of(
        model, gpu=chips, gpus=sizes[0] if sizes else None, sequence=seq, tokens=tokens, batch_tokens=batch_tokens,
        is_file=cluster is not None,
    )  # fmt: skip
    sizes = sizes or [run.cluster.gpus]
    pricing: dict[str, Any] = {"provider": provider, "price": price, "spot": spot, "live_prices": live_prices}
    precisions = [name.strip() for name in precision.split(",")] if precision is not None else []
    if debug:
        return _print_sizes(cheapest_to_debug(run, spot=spot, live_prices=live_prices, precisions=precisions), as_json)
    if len(sizes) > 1 or budget or deadline or pareto:
        found = sweep(run, sizes, budget=budget, deadline_days=_days(deadline), precisions=precisions, **pricing)
        found = [size for size in found if size.on_frontier or not pareto]
        if objective == "cost":
            found.sort(key=lambda size: size.best.cost.gpu_hours or 0.0)
        return _print_sizes(found, as_json)
    answer = make_plan(run, top=top, precisions=precisions, **pricing)
    if as_json:
        json.dump({key: value for key, value in answer.dump().items() if key != "run"}, sys.stdout)
        print()
    else:
        from shardwise.report.plan_table import print_plan

        print_plan(answer, _console())
    if out:
        from shardwise.cli.output import write_whole

        write_whole(out, answer.run.to_yaml(), "-o")
    return 0 if answer.candidates[0].verdict != "oom" else 1


def _print_sizes(sizes: list[Any], as_json: bool) -> int:
    """Exit code 1 where there is nothing to show."""
    if as_json:
        json.dump({"sizes": [size.model_dump(mode="json", by_alias=True) for size in sizes]}, sys.stdout)
        print()
    elif sizes:
        from shardwise.report.plan_table import print_sizes

        print_sizes(sizes, _console())
    else:
        print("no size fits, or none within the limits")
    return 0 if sizes else 1


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def _days(text: str | None) -> float | None:
    """`14d` or `36h`, in days. Raises InputError."""
    from shardwise.spec import InputError

    if text is None:
        return None
    units = {"d": 1.0, "h": 1 / 24}
    try:
        days = float(text[:-1]) * units[text[-1:]]
    except (ValueError, KeyError):
        raise InputError(f"--deadline {text}: days or hours such as 14d or 36h are expected") from None
    if days <= 0:
        raise InputError(f"--deadline {text}: must be more than 0")
    return days
