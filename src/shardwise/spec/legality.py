"""Legality: which Layouts a Model and a Recipe allow. One place for all rooms."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec.combinations import conflicts
from shardwise.spec.layout import Layout
from shardwise.spec.model import Model
from shardwise.spec.recipe import Recipe


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
    yield from conflicts(model, layout)
    yield from _batch(layout, recipe)
    if recipe.batch_tokens and not recipe.batch_sequences % (layout.data_ranks * layout.micro_batch):
        yield from schedule_problems(layout, recipe.batch_sequences // (layout.data_ranks * layout.micro_batch))


def _degrees(model: Model, layout: Layout, recipe: Recipe) -> Iterator[str]:
    """Tensor, context and expert parallelism cut dimensions evenly."""
    if layout.tp > 1:
        for field in ("heads", "ffn", "vocabulary"):
            if (size := getattr(model, field)) % layout.tp:
                nearest = nearest_divisor(size, layout.tp)
                yield f"layout.tp {layout.tp} does not divide model.{field} {size}; nearest: {nearest}"
        if model.experts:
            parts = {"shared_ffn": model.experts.shared_ffn} | ({"ffn": model.experts.ffn} if layout.ep == 1 else {})
            for field, size in parts.items():
                if size % layout.tp:
                    nearest = nearest_divisor(size, layout.tp)
                    yield f"layout.tp {layout.tp} does not divide model.experts.{field} {size}; nearest: {nearest}"
        if not model.latent and model.kv_heads % layout.tp and layout.tp % model.kv_heads:
            nearest = nearest_divisor(model.kv_heads, layout.tp)
            yield (
                f"layout.tp {layout.tp} neither divides model.kv_heads {model.kv_heads} nor is a multiple of it; "
                f"nearest: {nearest}"
            )
    cut = (2 * layout.cp if layout.cp > 1 else 1) * layout.tp  # each rank of cp takes an early and a late piece
    if recipe.sequence % cut:
        nearest = max(1, round(recipe.sequence / cut)) * cut
        yield (
            f"recipe.sequence {recipe.sequence} is not a multiple of {cut} (2 · cp {layout.cp} · tp {layout.tp}); "
            f"nearest: {nearest}"
        )
    if layout.cp > 1 and layout.cp_method == "ulysses":
        field = "heads" if model.latent else "kv_heads"
        heads = max(1, getattr(model, field) // layout.tp)
        if heads % layout.cp:
            nearest = nearest_divisor(heads, layout.cp)
            yield (
                f"layout.cp {layout.cp} with cp_method ulysses does not divide the {heads} of model.{field} "
                f"{getattr(model, field)} that a rank of tp {layout.tp} has; nearest: cp {nearest}, or "
                "cp_method: allgather"
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
