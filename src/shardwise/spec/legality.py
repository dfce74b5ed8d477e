"""Legality: which Layouts a Model and a Recipe allow, and what the trainer can do today. One place for all rooms."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec.layout import Layout
from shardwise.spec.model import Model
from shardwise.spec.noun import InputError
from shardwise.spec.recipe import Recipe
from shardwise.spec.run import Run


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that lies closest to `wanted`; the smaller one of two."""
    return min(divisors(number), key=lambda n: (abs(n - wanted), n))


def illegal(model: Model, layout: Layout, recipe: Recipe) -> Iterator[str]:
    """Each reason why this layout cannot run, naming the field, its value and the nearest legal one."""
    if layout.zero == 0 and layout.dp_shard > 1:
        yield (
            f"layout.zero 0 (DDP) shards nothing, but dp_shard is {layout.dp_shard}: "
            f"set zero: 3, or dp_replicate: {layout.dp_replicate * layout.dp_shard} and dp_shard: 1"
        )
    if layout.zero > 0 and layout.dp_shard == 1 and layout.dp_replicate > 1:
        yield (
            f"layout.zero {layout.zero} needs dp_shard > 1: set zero: 0 (DDP), "
            f"or dp_shard: {layout.dp_replicate} and dp_replicate: 1"
        )
    if model.positions == "learned" and recipe.sequence > model.max_sequence:
        yield (
            f"recipe.sequence {recipe.sequence} is longer than the model's table of learned positions; "
            f"nearest: {model.max_sequence}"
        )
    yield from _batch(layout, recipe)


def _batch(layout: Layout, recipe: Recipe) -> Iterator[str]:
    """The global batch must split evenly over data ranks and micro-batches."""
    if not recipe.batch_tokens:
        return
    sequences, quantum = recipe.batch_sequences, layout.data_ranks * layout.micro_batch
    if sequences % quantum == 0:
        return
    batch = max(1, round(sequences / quantum)) * quantum * recipe.sequence
    text = (
        f"recipe.batch_tokens {recipe.batch_tokens} is {sequences} sequences of {recipe.sequence}, which do not "
        f"divide over {layout.data_ranks} data ranks × micro_batch {layout.micro_batch}; nearest: batch_tokens {batch}"
    )
    if sequences % layout.data_ranks == 0:
        micro = nearest_divisor(sequences // layout.data_ranks, layout.micro_batch)
        text += f", or layout.micro_batch {micro}"
    else:
        text += f", or {nearest_divisor(sequences, layout.data_ranks)} data ranks"
    yield text


def not_trainable(layout: Layout, recipe: Recipe) -> Iterator[str]:
    """What is legal but what `train` does not do yet, or needs and did not get."""
    plain = Layout(zero=layout.zero, dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard)
    for field in ("tp", "cp", "pp", "ep", "recompute", "offload", "async_tp", "loss", "compile"):
        value, works = getattr(layout, field), getattr(plain, field)
        if value != works:
            yield f"layout.{field} {value} cannot be trained by this version; what works: {field}: {works}"
    if layout.zero == 1:
        yield "layout.zero 1 cannot be trained by this version; what works: 0 (DDP), 2 or 3 (FSDP2)"
    if not recipe.batch_tokens:
        yield (
            "recipe.batch_tokens is required for training: a batch that moved with the layout would change what is "
            "learned"
        )
    if not (recipe.steps or recipe.tokens):
        yield "recipe.steps or recipe.tokens is required for training"
    precision = recipe.precision
    wide = {precision.parameters, precision.gradients, precision.moments}
    if len(wide) > 1 or precision.parameters in ("bf16", "fp16"):
        yield (
            f"recipe.precision: parameters {precision.parameters}, gradients {precision.gradients} and moments "
            f"{precision.moments} must be one of fp32 or fp64; nearest: fp32 for all three"
        )
    elif precision.compute not in ("bf16", "fp16", precision.parameters):
        yield (
            f"recipe.precision.compute {precision.compute} does not go with parameters {precision.parameters}; "
            f"nearest: {precision.parameters}"
        )
    if precision.reduce != precision.gradients:
        yield (
            f"recipe.precision.reduce {precision.reduce} differs from gradients {precision.gradients}, which this "
            f"version does not do; nearest: {precision.gradients}"
        )


def require_trainable(run: Run, world: int) -> None:
    """Raise InputError with every reason why `train` cannot run this Run on `world` ranks."""
    layout = run.fixed_layout
    reasons = [*illegal(run.model, layout, run.recipe), *not_trainable(layout, run.recipe)]
    if layout.world != world:
        reasons.append(
            f"layout: {layout.describe()} makes {layout.world} ranks, but {world} are started; "
            f"use --nproc {layout.world}, or change the layout (layout: auto fits any number)"
        )
    if reasons:
        raise InputError("\n".join(reasons))
