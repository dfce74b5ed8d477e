"""From a Subject to what `own.py` needs to know of one of its pipeline ranks."""

from __future__ import annotations

from shardwise.planner.memory.block_tape import block_of
from shardwise.planner.memory.experts_tape import experts_block
from shardwise.planner.memory.latent_tape import latent_block
from shardwise.planner.memory.own import Own
from shardwise.planner.memory.own_held import Kind, Run, Stage
from shardwise.planner.memory.stages import Chunk, chunks_of
from shardwise.planner.memory.states import states
from shardwise.planner.memory.weights import (
    Weights,
    block_weights,
    position_weights,
    routed_weights,
    sharding,
    table_weights,
)
from shardwise.planner.recompute import Recompute, recompute_of
from shardwise.planner.subject import Subject
from shardwise.spec import Layout
from shardwise.spec.combinations import SPLIT_BACKWARD

# Bytes of an operand's element; nvfp4 has a scale of one byte for 16 elements.
_OPERAND_BYTES = {"fp8": 1.0, "fp4": 0.5 + 1 / 16}


def has_own_moments(subject: Subject) -> bool:
    """Whether it is our own trainer, not compiled, in a layout that `own.py` knows."""
    model, plain = subject.model, subject.sequence_parallel and not subject.layout.compile
    return subject.stack.name == "shardwise" and plain and not (model.latent and subject.layout.cp > 1)


def own_rank(subject: Subject, rank: int) -> Own:
    """Raises ValueError where the schedule cannot do the number of micro-batches."""
    layout, model = subject.layout, subject.model
    chunks = chunks_of(subject, layout, rank)
    last = len(chunks) * layout.pp - 1
    recompute = recompute_of(layout.recompute)
    width, ranks = subject.activation_bytes, sharding(layout)
    replicas = layout.data_ranks * layout.cp
    kinds = {
        moe: kind_of(subject, moe=moe) for moe in (False, True) if any(_layers(chunk, moe) for chunk in chunks.values())
    }
    kinds = kinds or {False: kind_of(subject, moe=False)}
    stages = [
        Stage(_runs(kinds, chunk, recompute), first=number == 0, last=number == last)
        for number, chunk in chunks.items()
    ]
    wrapped = layout.zero < 2 and layout.tp * layout.pp * layout.ep == 1
    rows = layout.micro_batch * subject.sequence / layout.cp
    embeds, heads = 0 in chunks, last in chunks
    tables = 4 * max(1, width // 4) * subject.sequence / layout.cp * model.rotary_dim
    ids = 16.0 * subject.micro_batches * layout.micro_batch * subject.sequence
    tied = model.tied and embeds and heads
    table = table_weights(model, layout.tp, ranks)
    experts = Weights()
    if layout.ep > 1:
        experts = routed_weights(model, layout.tp, layout.ep, ranks) * sum(chunk.moe for chunk in chunks.values())
    return Own(
        kinds=tuple(kinds.values()),
        policy="selective" if recompute.kind == "selective" else "full",
        stages=tuple(stages),
        states=states(
            layout.schedule, layout.pp, subject.micro_batches, layout.virtual_stages, rank, gathers=layout.zero == 3
        ),
        table=table,
        positions=position_weights(model, ranks),
        tied=tied,
        own_head=heads and not model.tied,
        embeds=embeds,
        heads=heads,
        sharded=layout.zero >= 2,
        keeps_gathered=layout.zero == 2,
        shares=layout.dp_shard * layout.cp > 1,
        prefetch=layout.prefetch,
        replicated=wrapped and replicas > 1,
        summed=not wrapped and layout.zero < 2 and replicas > 1,
        zero1=layout.zero == 1,
        experts=experts,
        experts_summed=layout.world // layout.pp > layout.ep,
        copied=_copied(layout, stages, ranks, experts, table * (embeds + (heads and not tied))) * (layout.zero == 1),
        shards_on_host=layout.offload == "parameters",
        offloads_optimizer=layout.offload == "optimizer",
        offloads_activations=layout.offload == "activations",
        pipelined=layout.pp > 1,
        halves=layout.pp > 1 and layout.schedule in SPLIT_BACKWARD,
        micro_batches=subject.micro_batches,
        rows=rows,
        tables=tables if model.positions == "rope" else 0.0,
        ids=ids * (1 + 1 / layout.cp if layout.cp > 1 else 1),
        logits=rows * model.vocabulary / layout.tp,
        chunked=layout.loss == "chunked",
        operands=operand_bytes(subject, rows),
    )


def _layers(chunk: Chunk, moe: bool) -> range:
    """Places in the stage of the blocks with experts, or of the dense ones, which are the model's first."""
    return range(chunk.dense, chunk.layers) if moe else range(chunk.dense)


def _runs(kinds: dict[bool, Kind], chunk: Chunk, recompute: Recompute) -> tuple[Run, ...]:
    segments = recompute.segments(chunk.layers)
    repeated = {place for segment in segments for place in segment}
    longest = max(map(len, segments), default=1)
    runs = []
    for moe, kind in sorted(kinds.items(), reverse=True):
        places = _layers(chunk, moe)
        kept = sum(place not in repeated for place in places)
        again = [segment for segment in segments if segment.start in places]
        runs += [Run(kind, False, kept, 1, kept)] * (kept > 0)
        runs += [Run(kind, True, len(again), longest, sum(map(len, again)))] * bool(again)
    return tuple(runs)


def kind_of(subject: Subject, *, moe: bool) -> Kind:
    """The blocks with experts, or the dense ones."""
    layout, model, sequence = subject.layout, subject.model, subject.sequence
    width, ranks = subject.activation_bytes, sharding(layout)
    casts = width < 4 and layout.zero < 2
    block = block_of(model, layout.tp, layout.cp, layout.cp_method, layout.micro_batch, sequence, width, casts)
    weights = block_weights(model, layout.tp, layout.ep, ranks, moe=moe)
    if model.latent:
        block = latent_block(block, model, layout.tp, layout.micro_batch * sequence / layout.cp)
    if not moe:
        return Kind(block, weights, weights)
    shape = layout.tp, layout.cp, layout.ep, ranks, layout.micro_batch, sequence, layout.zero
    block = experts_block(block, model, *shape, reduces=layout.pp == 1)
    return Kind(block, weights, weights + block.nested * -1 if block.nested else weights)


def _copied(layout: Layout, stages: list[Stage], ranks: int, experts: Weights, tables: Weights) -> float:
    """Where tensor parallelism has cut the rows of a weight, the optimizer's part of it is columns; where expert
    parallelism has cut the list of experts, it is rows of each."""
    copied = experts.shard * (experts.shard < experts.whole)
    if layout.tp > 1:
        copied += sum(run.kind.block.rows_cut * run.layers for stage in stages for run in stage.runs) / max(1, ranks)
        copied += tables.shard
    return copied


def operand_bytes(subject: Subject, tokens: float) -> float:
    """Low-precision copies for the largest product of a backward, that of the MLP: of its input, its weight, and the
    gradient of its output. What autograd keeps stays in the compute type (torchao's Float8Linear saves the
    input that it was given and casts it again). Modelled: nothing here was measured."""
    model, tp = subject.model, subject.layout.tp
    columns = (2 if model.activation == "swiglu" else 1) * model.ffn / tp
    elements = tokens * (model.hidden + columns) + model.hidden * columns
    return _OPERAND_BYTES.get(subject.dtype, 0.0) * elements
