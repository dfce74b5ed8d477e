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
    if model.sliding_window and recipe.sequence > model.sliding_window:
        yield (
            f"recipe.sequence {recipe.sequence} is longer than model.sliding_window {model.sliding_window}: within the "
            f"window attention is plainly causal, beyond it this version cannot cut it off; "
            f"nearest: {model.sliding_window}"
        )
    yield from _degrees(model, layout, recipe)
    yield from _pipeline(model, layout)
    yield from _batch(layout, recipe)
    if recipe.batch_tokens and not recipe.batch_sequences % (layout.data_ranks * layout.micro_batch):
        yield from schedule_problems(layout, recipe.batch_sequences // (layout.data_ranks * layout.micro_batch))


def _degrees(model: Model, layout: Layout, recipe: Recipe) -> Iterator[str]:
    """Tensor, context and expert parallelism cut dimensions evenly."""
    if layout.tp > 1:
        heads = "heads" if model.latent else "kv_heads"
        for field in (heads, "ffn", "vocabulary"):
            if (size := getattr(model, field)) % layout.tp:
                nearest = nearest_divisor(size, layout.tp)
                yield f"layout.tp {layout.tp} does not divide model.{field} {size}; nearest: {nearest}"
    cut = (2 * layout.cp if layout.cp > 1 else 1) * layout.tp  # each rank of cp takes an early and a late piece
    if recipe.sequence % cut:
        nearest = max(1, round(recipe.sequence / cut)) * cut
        yield (
            f"recipe.sequence {recipe.sequence} is not a multiple of {cut} (2 · cp {layout.cp} · tp {layout.tp}); "
            f"nearest: {nearest}"
        )
    if layout.ep > 1:
        span = layout.dp_shard * layout.cp * layout.tp
        if model.experts is None:
            yield f"layout.ep {layout.ep} needs a model with experts; what works: ep: 1"
        elif model.experts.count % layout.ep:
            yield (
                f"layout.ep {layout.ep} does not divide the {model.experts.count} experts; "
                f"nearest: {nearest_divisor(model.experts.count, layout.ep)}"
            )
        if span % layout.ep:
            yield (
                f"layout.ep {layout.ep} does not divide dp_shard · cp · tp = {span}; "
                f"nearest: {nearest_divisor(span, layout.ep)}"
            )


_FIXED_VIRTUAL = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}


def _pipeline(model: Model, layout: Layout) -> Iterator[str]:
    """Stages need layers, and each schedule its number of stages per rank."""
    if layout.pp == 1:
        if layout.virtual_stages > 1:
            yield f"layout.virtual_stages {layout.virtual_stages} needs pp > 1; what works: virtual_stages: 1"
        return
    fixed = _FIXED_VIRTUAL.get(layout.schedule)
    if fixed and layout.virtual_stages != fixed:
        yield f"layout.schedule {layout.schedule} has virtual_stages {fixed}, not {layout.virtual_stages}"
    if not fixed and layout.virtual_stages == 1:
        yield f"layout.schedule {layout.schedule} needs virtual_stages of at least 2"
    stages = layout.pp * layout.virtual_stages
    if stages > model.layers:
        yield (
            f"layout.pp {layout.pp} × virtual_stages {layout.virtual_stages} makes {stages} stages, but the model has "
            f"{model.layers} layers; nearest: pp {max(1, model.layers // layout.virtual_stages)}"
        )


def enough_micro_batches(schedule: str, pipeline: int, micro_batches: int) -> bool:
    """Whether PyTorch's schedule can run this number of micro-batches."""
    if micro_batches < (2 * pipeline if schedule == "dualpipev" else pipeline):
        return False
    return not schedule.startswith("interleaved") or micro_batches % (micro_batches // pipeline) == 0


def schedule_problems(layout: Layout, micro_batches: int) -> Iterator[str]:
    """Numbers of micro-batches that PyTorch's schedules cannot do."""
    if layout.pp == 1 or enough_micro_batches(layout.schedule, layout.pp, micro_batches):
        return
    least = 2 * layout.pp if layout.schedule == "dualpipev" else layout.pp
    if micro_batches < least:
        yield (
            f"layout.schedule {layout.schedule} with pp {layout.pp} needs at least {least} micro-batches a step and "
            f"gets {micro_batches}: use a smaller micro_batch or pp, or fewer data ranks"
        )
    else:
        nearest = round(micro_batches / layout.pp) * layout.pp
        yield (
            f"layout.schedule {layout.schedule} with pp {layout.pp} cannot cut {micro_batches} micro-batches into "
            f"equal rounds; nearest: {nearest}"
        )


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


def untrainable(model: Model, layout: Layout) -> Iterator[str]:
    """What is legal and can be planned, but what `train` does not do yet."""
    for field in ("experts", "latent", "attention_sinks"):
        if getattr(model, field):
            yield f"model.{field} cannot be trained by this version, only planned; {model.name} has it"
    plain = Layout(zero=layout.zero, dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard)
    for field in ("tp", "cp", "pp", "ep", "recompute", "offload", "async_tp", "loss", "compile"):
        value, works = getattr(layout, field), getattr(plain, field)
        if value != works:
            yield f"layout.{field} {value} cannot be trained by this version; what works: {field}: {works}"
    if layout.zero == 1:
        yield "layout.zero 1 cannot be trained by this version; what works: 0 (DDP), 2 or 3 (FSDP2)"


def not_trainable(model: Model, layout: Layout, recipe: Recipe) -> Iterator[str]:
    """`untrainable`, and what `train` needs of a recipe and did not get."""
    yield from untrainable(model, layout)
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
    reasons = [*illegal(run.model, layout, run.recipe), *not_trainable(run.model, layout, run.recipe)]
    if layout.world != world:
        reasons.append(
            f"layout: {layout.describe()} makes {layout.world} ranks, but {world} are started; "
            f"use --nproc {layout.world}, or change the layout (layout: auto fits any number)"
        )
    if reasons:
        raise InputError("\n".join(reasons))
