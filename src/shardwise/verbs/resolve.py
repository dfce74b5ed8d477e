"""`layout: auto` becomes a Layout: the planner's first choice, of what `train` can run."""

from __future__ import annotations

from shardwise.planner.memory import capacity_bytes
from shardwise.planner.search import search
from shardwise.planner.stacks import STACKS
from shardwise.spec import InputError, Layout, Run
from shardwise.spec.legality import divisors, nearest_divisor
from shardwise.spec.memory import GIB

_MICRO_BATCH_TOKENS = 16_384  # where nothing is known of the chip


def resolve_layout(run: Run, world: int) -> Run:
    """A Run whose layout is fixed and whose cluster has `world` devices.

    auto: the fastest data-parallel layout that fits by the planner's figures. Where it has none (a CPU, fp32): FSDP2
    over all ranks, and the largest micro-batch of at most 16,384 tokens that divides the batch. Raises InputError where
    the batch does not divide over `world` ranks, or nothing fits.
    """
    per_node = run.cluster.gpus_per_node
    if world > per_node and world % per_node:  # an odd number of local ranks on a machine of one node
        per_node = world
    run = run.replace(cluster=run.cluster.model_copy(update={"gpus": world, "gpus_per_node": per_node}))
    if not isinstance(run.layout, str):
        return run
    if not run.recipe.batch_tokens:
        return run.replace(layout=Layout.load({"dp_shard": world}))
    sequences = run.recipe.batch_sequences
    if sequences % world:
        raise InputError(
            f"recipe.batch_tokens {run.recipe.batch_tokens} is {sequences} sequences of {run.recipe.sequence}, which "
            f"do not divide over {world} ranks; nearest: {nearest_divisor(sequences, world)} ranks, or batch_tokens "
            f"{max(1, round(sequences / world)) * world * run.recipe.sequence}"
        )
    return run.replace(layout=_planned(run) or _plain(run, world))


def _planned(run: Run) -> Layout | None:
    """The planner's choice; None where it knows too little, or nothing is legal (which is said later, with reasons)."""
    if run.recipe.precision.compute not in ("bf16", "fp16"):
        return None
    try:
        found = search(run.model, run.cluster, run.recipe, STACKS["shardwise"], trainable=True).found
    except InputError:
        return None
    best = next((item for item in found if item.verdict == "fits"), found[0])
    if best.verdict == "oom":
        raise InputError(
            f"layout: auto finds no data-parallel layout of {run.model.name} that fits {run.cluster.gpus} × "
            f"{run.cluster.gpu.name}: the leanest needs {best.memory.used[0] / GIB:.0f} GiB of "
            f"{capacity_bytes(run.cluster.gpu) / GIB:.0f}; `shardwise plan` shows what would fit"
        )
    return best.layout


def _plain(run: Run, world: int) -> Layout:
    most = max(1, _MICRO_BATCH_TOKENS // run.recipe.sequence)
    micro_batch = max(n for n in divisors(run.recipe.batch_sequences // world) if n <= most)
    return Layout.load({"dp_shard": world, "micro_batch": micro_batch})
