"""One given layout: may it run, and what are its predictions?"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner.memory import predict_memory
from shardwise.planner.offload import verdict_of
from shardwise.planner.search import Found
from shardwise.planner.stacks import Stack
from shardwise.planner.step import StepModel
from shardwise.planner.subject import assumed_micro_batches, subject_of
from shardwise.spec import Cluster, InputError, Layout, Model, Recipe
from shardwise.spec.legality import illegal, schedule_problems


def micro_batches_of(layout: Layout, recipe: Recipe) -> int:
    """Per step and data rank."""
    if recipe.batch_tokens is None:
        return assumed_micro_batches(layout)
    return recipe.batch_sequences // (layout.data_ranks * layout.micro_batch)


def refusals(model: Model, layout: Layout, cluster: Cluster, recipe: Recipe) -> Iterator[str]:
    """Each reason why this layout cannot run on this cluster."""
    if layout.world != cluster.gpus:
        yield (
            f"layout: {layout.describe()} makes {layout.world} ranks, but cluster.gpus is {cluster.gpus}; "
            "dp_shard or dp_replicate can make up for it"
        )
    reasons = list(illegal(model, layout, recipe))
    yield from reasons
    if not reasons and recipe.batch_tokens is None:
        yield from schedule_problems(layout, micro_batches_of(layout, recipe))


def judge(
    model: Model,
    layout: Layout,
    cluster: Cluster,
    recipe: Recipe,
    stack: Stack,
    *,
    steps: StepModel | None = None,
) -> Found:
    """Its predictions. `steps`: a StepModel of the same model, cluster, stack and precision, to save time.

    Raises InputError with every reason why the layout cannot run, or where the chip's figures are not known.
    """
    reasons = list(refusals(model, layout, cluster, recipe))
    if reasons:
        raise InputError("\n".join(reasons))
    subject = subject_of(model, layout, cluster, stack, recipe, micro_batches_of(layout, recipe))
    memory = predict_memory(subject)
    return Found(subject, (steps or StepModel(subject)).predict(subject), memory, verdict_of(subject, memory))
