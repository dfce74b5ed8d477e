"""A Run with its layout fixed, and its predictions: what `explain`, `whatif` and `compare` start from."""

from __future__ import annotations

import datetime

from shardwise.planner.neighbours import spread
from shardwise.planner.price import choose_price
from shardwise.planner.search import Found, search
from shardwise.planner.single import judge
from shardwise.planner.stacks import own_stack
from shardwise.spec import Layout, Run
from shardwise.spec.plan import Candidate
from shardwise.spec.presets import prices
from shardwise.verbs.notes import on_figures, on_price
from shardwise.verbs.plan import candidate_of


def predict_run(run: Run) -> tuple[Run, Found, Candidate, tuple[str, ...]]:
    """The Run with `layout: auto` replaced by the planner's first choice, its predictions, priced where a dated price
    is known, and notes on what was assumed.

    Raises InputError where no layout, or not this one, can run.
    """
    stack = own_stack(run.cluster.gpu)
    notes = [*on_figures(run.cluster.gpu)]
    if isinstance(run.layout, str):
        found = search(run.model, run.cluster, run.recipe, stack, top=1).found[0]
        run = run.replace(layout=found.layout)
        notes.append("layout: auto is the planner's first choice")
    else:
        found = judge(run.model, run.layout, run.cluster, run.recipe, stack)
    if run.recipe.batch_tokens is None:
        notes.append(f"recipe.batch_tokens is not given: {found.subject.micro_batches} micro-batch(es) per data rank")
    today = datetime.date.today()
    offer = choose_price(prices(), run.cluster.gpu.name, today)
    if offer:
        notes.append(on_price(offer, today))
    return run, found, candidate_of(found, run, offer), tuple(notes)


def fill_cluster(run: Run) -> tuple[Run, tuple[str, ...]]:
    """The Run with dp_shard (DDP: dp_replicate) made up so that its layout fills the cluster, where that is possible,
    and a note that says so."""
    layout, gpus = run.layout, run.cluster.gpus
    if not isinstance(layout, Layout) or layout.world == gpus:
        return run, ()
    spread_out = spread(layout, gpus)
    if isinstance(spread_out, str):
        return run, ()
    changed = [
        f"{name} {getattr(layout, name)} → {getattr(spread_out, name)}"
        for name in ("dp_replicate", "dp_shard", "zero")
        if getattr(layout, name) != getattr(spread_out, name)
    ]
    return run.replace(layout=spread_out), (f"to fill {gpus} chips: {', '.join(changed)}",)
