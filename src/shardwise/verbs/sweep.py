"""`plan` over cluster sizes and chips: scaling, the frontier of money against time, the cheapest card to debug on."""

from __future__ import annotations

from typing import Any

from shardwise.planner.live_prices import require_gpuhunt
from shardwise.planner.stacks import own_stack
from shardwise.planner.subject import dtype_of
from shardwise.spec import Cluster, InputError, Run
from shardwise.spec.plan import Candidate, ClusterSize
from shardwise.spec.presets import gpu_names, gpu_preset
from shardwise.verbs.plan import in_precisions, plan


def parse_sizes(text: str) -> list[int]:
    """`64`, or `8..1024`: doublings from the first to the last. Raises InputError."""
    first, dots, last = text.partition("..")
    try:
        low, high = int(first), int(last if dots else first)
    except ValueError:
        raise InputError(f"--gpus {text}: a number such as 64, or a range such as 8..1024, is expected") from None
    if low < 1 or high < low:
        raise InputError(f"--gpus {text}: a range runs upwards from at least 1, such as 8..1024")
    sizes = []
    while low <= high:
        sizes.append(low)
        low *= 2
    return sizes


def sweep(
    run: Run, sizes: list[int], *, budget: float | None = None, deadline_days: float | None = None, **options: Any
) -> list[ClusterSize]:
    """The best layout at each size at which one fits, smallest first: so the first is the smallest cluster that fits.
    `options` are those of `plan`.

    budget (USD) and deadline keep only sizes within them, which needs recipe.tokens, and for the budget a price.
    Sizes that no layout fits, or into which the batch does not divide, are left out. Raises InputError.
    """
    if (budget or deadline_days) and not run.recipe.tokens:
        raise InputError("--budget and --deadline need --tokens: how much is to be trained")
    if options.get("live_prices"):
        require_gpuhunt()
    for item in in_precisions(run, options.get("precisions", ())):  # no rate, no size: said once, and not passed over
        own_stack(run.cluster.gpu).speed(run.cluster.gpu, dtype_of(item.recipe.precision))
    found: list[tuple[int, Candidate]] = []
    for gpus in sizes:
        try:
            cluster = Cluster.load({"gpu": run.cluster.gpu, "gpus": gpus}, "cluster")
            best = plan(run.replace(cluster=cluster), top=1, **options).candidates[0]
        except InputError:
            continue
        if best.verdict != "oom":
            found.append((gpus, best))
    if budget and any(best.cost.usd is None for _, best in found):
        raise InputError(f"--budget needs a price of {run.cluster.gpu.name}: give --price")
    base = found[0][1].time.tokens_per_second_per_gpu if found else 1.0
    return [
        ClusterSize(
            gpus=gpus,
            gpu=run.cluster.gpu.name,
            best=best,
            scaling_efficiency=best.time.tokens_per_second_per_gpu / base,
            on_frontier=_undominated(best, found),
        )
        for gpus, best in found
        if _within(best, budget, deadline_days)
    ]


def _within(best: Candidate, budget: float | None, deadline_days: float | None) -> bool:
    cost = best.cost
    return not (
        (budget and cost.usd is not None and cost.usd > budget)
        or (deadline_days and cost.hours is not None and cost.hours > 24 * deadline_days)
    )


def _undominated(best: Candidate, others: list[tuple[int, Candidate]]) -> bool:
    hours, hours_of_gpus = best.cost.hours, best.cost.gpu_hours
    if hours is None or hours_of_gpus is None:
        return True
    return not any(
        (other.cost.hours or 0) < hours and (other.cost.gpu_hours or 0) <= hours_of_gpus
        for _, other in others
        if other is not best
    )


def cheapest_to_debug(run: Run, **options: Any) -> list[ClusterSize]:
    """One card of each kind that holds the model with one sequence, the cheapest hour first. Architecture is debugged
    there; the run is trained elsewhere. `options` are those of `plan`."""
    small = run.replace(recipe=run.recipe.model_copy(update={"batch_tokens": None, "tokens": None, "steps": None}))
    if options.get("live_prices"):
        require_gpuhunt()
    in_precisions(run, options.get("precisions", ()))
    priced = []
    for name in gpu_names():
        cluster = Cluster.load({"gpu": gpu_preset(name), "gpus": 1}, "cluster")
        try:
            best = plan(small.replace(cluster=cluster), top=1, **options).candidates[0]
        except InputError:
            continue
        if best.verdict == "fits" and best.cost.price_usd_per_gpu_hour is not None:
            priced.append((best.cost.price_usd_per_gpu_hour, ClusterSize(gpus=1, gpu=name, best=best)))
    return [size for _, size in sorted(priced, key=lambda pair: pair[0])]
