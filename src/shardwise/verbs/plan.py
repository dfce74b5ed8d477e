"""`plan`: which layout, will it fit, how fast, how dear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardwise.planner.explain import reasons, utilisation
from shardwise.planner.search import Found, search
from shardwise.planner.stacks import own_stack
from shardwise.spec import InputError, Precision, Run
from shardwise.spec.plan import Candidate, Cost, Plan, PredictedTime
from shardwise.spec.price import Price
from shardwise.spec.trainable import untrainable, untrainable_precision
from shardwise.verbs.beside import own_error
from shardwise.verbs.notes import communication_class, compute_class, on_figures, on_precisions
from shardwise.verbs.offers import choose_offer


def plan(
    run: Run | dict[str, Any],
    *,
    provider: str | None = None,
    price: float | None = None,
    spot: bool = False,
    live_prices: bool = False,
    top: int = 10,
    precisions: Sequence[str] = (),
) -> Plan:
    """Rank every legal layout of a Run's model on its cluster, whatever layout it has now.

    precisions: names such as "fp8", ranked together, instead of the recipe's own precision alone.
    price: USD per GPU-hour instead of the dated snapshot's offer; live_prices: today's, where gpuhunt has one.
    Costs are for recipe.tokens or recipe.steps.
    Raises InputError.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    runs = in_precisions(run, precisions)
    results = [search(item.model, item.cluster, item.recipe, own_stack(run.cluster.gpu), top=top) for item in runs]
    pairs = [(found, item) for item, result in zip(runs, results, strict=True) for found in result.found]
    pairs = sorted(pairs, key=lambda pair: (pair[0].verdict == "oom", -pair[0].tokens_per_second))[:top]
    offer, on_offer = choose_offer(run.cluster.gpu, provider=provider, price=price, spot=spot, live=live_prices)
    notes = [*on_figures(run.cluster.gpu), *on_offer]
    notes += [text] if (text := own_error(Path("runs"), run.cluster.gpu.name)) else []
    if run.recipe.batch_tokens is None:
        notes.append("the batch is not given: each data rank gets as few micro-batches as its schedule allows")
    notes += on_precisions(run.recipe.precision, (item.recipe.precision for item in runs))
    notes += [f"train: {reason}" for reason in untrainable(run.model)]
    notes += [f"train: {text}" for item in runs for text in untrainable_precision(item.recipe.precision)]
    return Plan(
        candidates=tuple(candidate_of(found, item, offer) for found, item in pairs),
        rejected=dict(sum((Counter(result.rejected) for result in results), Counter())),
        searched=sum(result.searched for result in results),
        seconds=sum(result.seconds for result in results),
        run=pairs[0][1].replace(layout=pairs[0][0].layout),
        notes=tuple(notes),
    )


def in_precisions(run: Run, precisions: Iterable[str]) -> list[Run]:
    """The Run in each precision; as it is where none is named. Raises InputError for an unknown name."""
    return [
        run.replace(recipe=run.recipe.model_copy(update={"precision": precision}))
        for precision in dict.fromkeys(Precision.load(name, "precision") for name in precisions)
    ] or [run]


def candidate_of(found: Found, run: Run, offer: Price | None) -> Candidate:
    """One layout's predictions as a noun; `offer` prices it."""
    per_gpu = found.tokens_per_second / run.cluster.gpus
    mfu, hfu = utilisation(found.subject, per_gpu)
    exposed = {kind: found.step.parts[kind] for kind in ("data", "tensor", "context", "expert")}
    return Candidate(
        layout=found.layout,
        precision=run.recipe.precision.name,
        verdict=found.verdict,
        memory=found.memory,
        time=PredictedTime(
            step_seconds=found.step.seconds,
            tokens_per_second_per_gpu=per_gpu,
            mfu=mfu,
            hfu=hfu,
            bubble_fraction=found.step.bubble_fraction,
            exposed_seconds=exposed,
            compute_class=compute_class(run.cluster.gpu),
            communication_class=communication_class(run.cluster.gpu),
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
    model: str,
    *,
    gpu: str,
    gpus: int | None,
    sequence: int,
    tokens: str | None = None,
    batch_tokens: str | None = None,
    is_file: bool = False,
) -> Run:
    """The Run that `shardwise plan`'s options describe. gpu: a preset, or (is_file) a Cluster file, which also says how
    many where `gpus` is None. Raises InputError."""
    recipe = {"sequence": sequence, "tokens": tokens, "batch_tokens": batch_tokens}
    if gpus is not None and gpus < 1:
        raise InputError(f"--gpus {gpus}: at least 1 is needed")
    cluster = {("file" if is_file else "gpu"): gpu, **({} if gpus is None else {"gpus": gpus})}
    return Run.load({"model": model, "cluster": cluster, "recipe": recipe})
