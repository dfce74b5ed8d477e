"""`layout: auto` becomes a Layout: the planner's first choice of what `train` can run."""

from __future__ import annotations

import datetime

from shardwise.planner.memory import capacity_bytes
from shardwise.planner.search import search
from shardwise.planner.stacks import generation, own_stack
from shardwise.spec import Cluster, InputError, Layout, Run
from shardwise.spec.cluster import Figure
from shardwise.spec.legality import divisors, nearest_divisor
from shardwise.spec.memory import GIB
from shardwise.verbs.machine import memory_bytes

_MICRO_BATCH_TOKENS = 16_384  # where the planner knows no rates


def resolve_layout(run: Run, world: int) -> Run:
    """A Run whose layout is fixed and whose cluster has `world` devices.

    auto: the fastest layout that `train` can run and that fits by the planner's figures; a chip of unknown memory (a
    CPU) has its share of this machine's. Where the planner does not know the chip's rate in this precision: FSDP2 over
    all ranks, and the largest micro-batch of at most 16,384 tokens that divides the batch. Raises InputError where the
    batch does not divide over `world` ranks, or nothing fits.
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
    cluster = _with_memory(run.cluster)
    try:
        found = search(run.model, cluster, run.recipe, own_stack(cluster.gpu)).found
    except InputError:
        return None
    best = next((item for item in found if item.verdict == "fits"), found[0])
    capacity = capacity_bytes(cluster.gpu)
    if best.verdict == "oom" and capacity is not None:
        raise InputError(
            f"layout: auto finds no layout of {run.model.name} that `train` can run and that fits "
            f"{run.cluster.gpus} × {run.cluster.gpu.name}: the leanest needs {_gib(best.memory.used[0])} GiB of "
            f"{_gib(capacity)}; `shardwise plan` shows what would fit"
        )
    return best.layout


def _gib(size: float) -> str:
    return f"{size / GIB:.0f}" if size >= 10 * GIB else f"{size / GIB:.1f}"


def _with_memory(cluster: Cluster) -> Cluster:
    """A rank's share of this machine's memory, where the chip's own is not known and ranks are processes on it."""
    if capacity_bytes(cluster.gpu) is not None or generation(cluster.gpu) != "cpu":
        return cluster
    total = memory_bytes()
    if total is None:
        return cluster
    share = total / min(cluster.gpus, cluster.gpus_per_node) / 1e9
    memory = {"value": share, "class": "measured", "source": "this machine", "date": datetime.date.today()}
    gpu = cluster.gpu.model_copy(update={"memory_gb": Figure.load(memory, "memory_gb")})
    return cluster.model_copy(update={"gpu": gpu})


def _plain(run: Run, world: int) -> Layout:
    most = max(1, _MICRO_BATCH_TOKENS // run.recipe.sequence)
    micro_batch = max(n for n in divisors(run.recipe.batch_sequences // world) if n <= most)
    return Layout.load({"dp_shard": world, "micro_batch": micro_batch})
