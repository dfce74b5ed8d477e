"""`layout: auto` becomes a Layout."""

from __future__ import annotations

from shardwise.spec import InputError, Layout, Run
from shardwise.spec.legality import divisors, nearest_divisor

_MICRO_BATCH_TOKENS = 16_384  # enough to fill one device, small enough for its memory, until the planner chooses


def resolve_layout(run: Run, world: int) -> Run:
    """A Run whose layout is fixed and whose cluster has `world` devices.

    auto: FSDP2 over all ranks (zero 3), and the largest micro-batch of at most 16,384 tokens that divides the batch.
    Raises InputError where the batch does not divide over `world` ranks.
    """
    per_node = run.cluster.gpus_per_node
    if world > per_node and world % per_node:  # an odd number of local ranks on a machine of one node
        per_node = world
    run = run.replace(cluster=run.cluster.model_copy(update={"gpus": world, "gpus_per_node": per_node}))
    if not isinstance(run.layout, str) or not run.recipe.batch_tokens:
        return run if not isinstance(run.layout, str) else run.replace(layout=Layout.load({"dp_shard": world}))
    sequences = run.recipe.batch_sequences
    if sequences % world:
        raise InputError(
            f"recipe.batch_tokens {run.recipe.batch_tokens} is {sequences} sequences of {run.recipe.sequence}, which "
            f"do not divide over {world} ranks; nearest: {nearest_divisor(sequences, world)} ranks, or batch_tokens "
            f"{max(1, round(sequences / world)) * world * run.recipe.sequence}"
        )
    most = max(1, _MICRO_BATCH_TOKENS // run.recipe.sequence)
    micro_batch = max(n for n in divisors(sequences // world) if n <= most)
    return run.replace(layout=Layout.load({"dp_shard": world, "micro_batch": micro_batch}))
