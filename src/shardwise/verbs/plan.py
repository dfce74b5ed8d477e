"""`plan`: which layout, will it fit, how fast, how dear."""

from __future__ import annotations

import datetime
from typing import Any

from shardwise.planner.explain import reasons, utilisation
from shardwise.planner.price import age_days, choose_price
from shardwise.planner.search import Found, search
from shardwise.planner.stacks import STACKS
from shardwise.spec import InputError, Run
from shardwise.spec.legality import untrainable
from shardwise.spec.plan import Candidate, Cost, Plan, PredictedTime
from shardwise.spec.presets import prices
from shardwise.spec.price import Price


def plan(
    run: Run | dict[str, Any],
    *,
    provider: str | None = None,
    price: float | None = None,
    spot: bool = False,
    top: int = 10,
) -> Plan:
    """Rank every legal layout of a Run's model on its cluster, whatever layout it has now.

    price: USD per GPU-hour instead of the dated snapshot's offer. Costs are for recipe.tokens or recipe.steps.
    Raises InputError.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    result = search(run.model, run.cluster, run.recipe, STACKS["shardwise"], top=top)
    today = datetime.date.today()
    offer = choose_price(prices(), run.cluster.gpu.name, today, provider=provider, spot=spot)
    if price is not None:
        offer = Price.load(
            {"gpu": run.cluster.gpu.name, "provider": "given", "usd_per_gpu_hour": price, "date": today,
             "source": "--price"}, "--price",
        )  # fmt: skip
    notes = [f"time and memory are modelled, not measured: {STACKS['shardwise'].name} on {run.cluster.gpu.name}"]
    if offer is None:
        notes.append(f"no dated price of {run.cluster.gpu.name} is known: give --price")
    elif price is None:
        notes.append(
            f"price: {offer.usd_per_gpu_hour} USD per GPU-hour at {offer.provider} ({offer.kind}), "
            f"{age_days(offer, today)} days old"
        )
    if run.recipe.batch_tokens is None:
        notes.append("the batch is not given: each data rank gets as few micro-batches as its schedule allows")
    candidates = tuple(candidate_of(found, run, offer) for found in result.found)
    trainable = [
        number for number, found in enumerate(candidates, start=1) if not any(untrainable(run.model, found.layout))
    ]
    if len(trainable) < len(candidates):
        first = f"the first of them is number {trainable[0]}" if trainable else "none of these is one"
        notes.append(f"`shardwise train` runs data-parallel layouts without recompute so far: {first}")
    return Plan(
        candidates=candidates,
        rejected=result.rejected,
        searched=result.searched,
        seconds=result.seconds,
        run=run.replace(layout=candidates[0].layout),
        notes=tuple(notes),
    )


def candidate_of(found: Found, run: Run, offer: Price | None) -> Candidate:
    """One layout's predictions as a noun; `offer` prices it."""
    per_gpu = found.tokens_per_second / run.cluster.gpus
    mfu, hfu = utilisation(found.subject, per_gpu)
    exposed = {kind: found.step.parts[kind] for kind in ("data", "tensor", "context", "expert")}
    return Candidate(
        layout=found.layout,
        verdict=found.verdict,
        memory=found.memory,
        time=PredictedTime(
            step_seconds=found.step.seconds,
            tokens_per_second_per_gpu=per_gpu,
            mfu=mfu,
            hfu=hfu,
            bubble_fraction=found.step.bubble_fraction,
            exposed_seconds=exposed,
        ),
        cost=_cost(found, run, offer),
        why=reasons(found),
    )


def _cost(found: Found, run: Run, offer: Price | None) -> Cost:
    price = {
        "price_usd_per_gpu_hour": offer.usd_per_gpu_hour if offer else None,
        "price_date": offer.date if offer else None,
        "provider": offer.provider if offer else None,
    }
    tokens = run.recipe.tokens
    if tokens is None and run.recipe.steps and run.recipe.batch_tokens:
        tokens = run.recipe.steps * run.recipe.batch_tokens
    if tokens is None:
        return Cost(**price)
    hours = tokens / found.tokens_per_second / 3600
    gpu_hours = hours * run.cluster.gpus
    return Cost(gpu_hours=gpu_hours, hours=hours, usd=gpu_hours * offer.usd_per_gpu_hour if offer else None, **price)


def run_of(
    model: str, *, gpu: str, gpus: int, sequence: int, tokens: str | None = None, batch_tokens: str | None = None
) -> Run:
    """The Run that `shardwise plan`'s options describe. Raises InputError."""
    recipe = {"sequence": sequence, "tokens": tokens, "batch_tokens": batch_tokens}
    if gpus < 1:
        raise InputError(f"--gpus {gpus}: at least 1 is needed")
    return Run.load({"model": model, "cluster": {"gpu": gpu, "gpus": gpus}, "recipe": recipe})
