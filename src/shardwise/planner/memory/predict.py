"""predict_memory: from a Subject to the Memory of its fullest rank."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from shardwise.planner.memory.activations import Policy, Style, block_kept, kept_bytes
from shardwise.planner.memory.experts import weighing_bytes
from shardwise.planner.memory.families import FAMILIES, Family, family_of
from shardwise.planner.memory.fit import outside_bytes
from shardwise.planner.memory.own_rank import has_own_moments, operand_bytes, own_rank
from shardwise.planner.memory.stages import Chunk, Held, chunks_of, held
from shardwise.planner.memory.units import Event, Situation, replicated_events, sharded_events
from shardwise.planner.memory.weights import Weights, block_weights, position_weights, sharding, table_weights
from shardwise.planner.memory.whole import whole_events, whole_states
from shardwise.planner.recompute import recompute_of
from shardwise.planner.stacks import generation
from shardwise.planner.subject import Subject
from shardwise.spec import Layout, Model
from shardwise.spec.memory import Memory

_WIDTHS = {"fp64": 8, "fp32": 4}  # of activations; 2 in every other type


def predict_memory(subject: Subject, stage_rank: int | None = None) -> Memory:
    """The peak of a step once optimizer states exist, on pipeline rank `stage_rank`, or on the fullest one.

    Its class is closed-form: no figure in it was measured on this subject. Raises ValueError where the pipeline's
    schedule cannot do the number of micro-batches (`spec/legality.py` says it first).
    """
    if stage_rank is not None:
        return _rank_memory(subject, stage_rank)
    return max((_rank_memory(subject, rank) for rank in _candidates(subject)), key=lambda memory: memory.live)


def _candidates(subject: Subject) -> list[int]:
    """Pipeline ranks of which one is the fullest: the ends, and the first of those with the most layers."""
    layout = subject.layout
    if layout.pp <= 3:
        return list(range(layout.pp))
    layers = [sum(chunk.layers for chunk in chunks_of(subject, layout, rank).values()) for rank in range(layout.pp)]
    return sorted({0, layers.index(max(layers)), layout.pp - 1})


def predict_moments(subject: Subject, stage_rank: int) -> list[Memory]:
    """Every moment of a step that can be the peak of pipeline rank `stage_rank`, the fullest first."""
    moments, *states = _moments(subject, stage_rank, every=True)
    fullest_first = sorted(moments, key=_live, reverse=True)
    return [_memory(subject, stage_rank, moment, *states) for moment in fullest_first]


def _live(moment: Event) -> float:
    return sum(moment[1:])


def _moments(subject: Subject, rank: int, *, every: bool = False) -> tuple[list[Event], float, float]:
    """With the bytes of parameters and optimizer state, which are there at all of them."""
    layout = subject.layout
    if has_own_moments(subject):
        own = own_rank(subject, rank)
        return list(own.moments(every=every)), *own.held()
    family = family_of(subject.stack.name, cpu=generation(subject.cluster.gpu) == "cpu")
    at = _situation(subject, family, rank)
    moments: Iterable[Event]
    if family.sharded_units:
        weights = at.blocks + at.table * (at.embeds + at.own_head) + at.positions * at.embeds
        wide = max(4, at.width)
        parameters = wide * (weights.whole if layout.zero == 1 else weights.shard)
        optimizer = 2 * wide * weights.shard
        moments = sharded_events(at) if layout.zero >= 2 else replicated_events(at)
    else:
        parameters, whole, optimizer = whole_states(at, family, subject.gradient_bytes)
        moments = whole_events(at, whole)
    if layout.offload in ("optimizer", "parameters"):
        optimizer = 0.0
    if layout.offload == "parameters":
        parameters = 0.0
    return list(moments), parameters, optimizer


def _rank_memory(subject: Subject, rank: int) -> Memory:
    moments, *states = _moments(subject, rank)
    return _memory(subject, rank, max(moments, key=_live), *states)


def _memory(subject: Subject, rank: int, moment: Event, parameters: float, optimizer: float) -> Memory:
    layout = subject.layout
    family = family_of(subject.stack.name, cpu=generation(subject.cluster.gpu) == "cpu")
    event, gradients, gathered, activations, logits, transient = moment
    transient += family.workspace
    live = parameters + optimizer + gradients + gathered + activations + logits + transient
    low, mid, high = family.slack
    communication, outside = outside_bytes(layout, family)
    return Memory.model_construct(
        rank=rank * (layout.world // layout.pp),
        stage=rank,
        class_="closed-form",
        overhead_class="modelled",
        event=event,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        activations=activations,
        logits=logits,
        transient=transient,
        reserved=(low * live, mid * live, high * live),
        communication=communication,
        outside=outside,
    )


def _situation(subject: Subject, family: Family, rank: int) -> Situation:
    layout, model = subject.layout, subject.model
    chunks = chunks_of(subject, layout, rank)
    embeds, heads = 0 in chunks, len(chunks) * layout.pp - 1 in chunks
    width = activation_width(subject)
    tokens = layout.micro_batch * subject.sequence / layout.cp
    even, ranks = not family.sharded_units, sharding(layout)
    counts = {False: sum(chunk.dense for chunk in chunks.values()), True: sum(chunk.moe for chunk in chunks.values())}
    kinds = [moe for moe, count in counts.items() if count] or [False]
    kept = {moe: _kept_of_block(subject, family, tokens, width, moe=moe) for moe in kinds}
    weights = {moe: block_weights(model, layout.tp, layout.ep, ranks, moe=moe, even=even) for moe in kinds}
    largest = max(kinds, key=lambda moe: kept[moe][0] + 4 * weights[moe].whole)

    most: Held = dict.fromkeys(chunks, 1)
    at_head = most
    if layout.pp > 1:
        most, at_head = held(layout.schedule, layout.pp, subject.micro_batches, layout.virtual_stages, rank)

    def activations(in_flight: Held) -> float:
        return sum(count * _kept_of_chunk(chunks[stage], kept, layout) for stage, count in in_flight.items())

    stream = width * tokens * model.hidden / (layout.tp if subject.sequence_parallel else 1)
    left, again = _recompute(layout, *kept[largest], stream=stream, blocks=_blocks_at_once(layout, chunks))
    offloaded = layout.offload == "activations"  # leaves the block that computes and the one that is being copied
    style = family.style(layout)
    return Situation(
        block=weights[largest],
        blocks=sum((weights[moe] * counts[moe] for moe in kinds), Weights()),
        casting=sum(
            weights[moe].whole * count
            for chunk in chunks.values()
            for (moe, again), count in _blocks_that_keep(layout.recompute, chunk.dense, chunk.moe).items()
            if not again
        ),
        cast_again=weights[largest].whole * _blocks_at_once(layout, chunks),
        table=table_weights(model, layout.tp, ranks, even=even),
        positions=position_weights(model, ranks, even=even),
        embeds=embeds,
        heads=heads,
        tied=model.tied and embeds and heads,
        width=width,
        casts=width < 4,
        keeps_gathered=layout.zero == 2,
        shares=layout.dp_shard * layout.cp > 1,
        prefetch=layout.prefetch,
        replicated=layout.zero < 2 and layout.data_ranks * layout.cp > 1 and layout.tp * layout.pp * layout.ep == 1,
        shards_on_host=layout.offload == "parameters",
        offloads_optimizer=layout.offload == "optimizer",
        micro_batches=subject.micro_batches,
        whole_gradients=layout.zero < 2 or (layout.pp > 1 and subject.micro_batches > 1),
        pipelined=layout.pp > 1 and subject.micro_batches > 1,
        stream=stream,
        head_input=width * tokens * model.hidden if layout.tp > 1 and subject.sequence_parallel else 0.0,
        kept=2 * left if offloaded else activations(most),
        kept_at_head=2 * left if offloaded else activations(at_head),
        kept_block=left,
        recomputed=again,
        working=_working(subject, tokens, width, style, moe=largest, stream=stream)
        + family.copies_operands * operand_bytes(subject, tokens),
        logits=tokens * model.vocabulary / layout.tp,
        loss=family.loss_bytes(layout),
        chunked=layout.loss == "chunked",
    )


def activation_width(subject: Subject) -> int:
    """Bytes of an element."""
    return _WIDTHS.get(subject.dtype, 2)


def kept_of_block(subject: Subject, tokens: float, *, moe: bool) -> tuple[float, float]:
    """Bytes that one block keeps of a micro-batch of `tokens` on this rank: without recompute, and where the layout's
    policy recomputes it."""
    family = family_of(subject.stack.name, cpu=generation(subject.cluster.gpu) == "cpu")
    return _kept_of_block(subject, family, tokens, activation_width(subject), moe=moe)


def _kept_of_block(subject: Subject, family: Family, tokens: float, width: int, *, moe: bool) -> tuple[float, float]:
    """Bytes that a block keeps without recompute, and with the layout's."""
    layout = subject.layout
    key = (layout.tp, layout.cp, layout.cp_method, layout.ep)
    policy = family.policy(layout)
    none, some = _kept_per_token(
        subject.model,
        family.name,
        layout.compile,
        *key,
        policy,
        subject.sequence,
        subject.sequence_parallel,
        width,
        moe,
    )
    return tokens * none, tokens * some


@functools.lru_cache(maxsize=65536)
def _kept_per_token(
    model: Model,
    family: str,
    compiled: bool,
    tp: int,
    cp: int,
    cp_method: Literal["allgather", "ring", "ulysses"],
    ep: int,
    policy: Policy,
    sequence: int,
    sequence_parallel: bool,
    width: int,
    moe: bool,
) -> tuple[float, float]:
    layout = Layout.model_construct(tp=tp, cp=cp, cp_method=cp_method, ep=ep, compile=compiled, zero=0)
    style = FAMILIES[family].style(layout)
    kept = block_kept(
        model, layout, style, moe=moe, sequence=sequence, sequence_parallel=sequence_parallel, width=width
    )
    return kept_bytes(kept, "none"), kept_bytes(kept, policy)


def _kept_of_chunk(chunk: Chunk, kept: dict[bool, tuple[float, float]], layout: Layout) -> float:
    """Saved activations of one micro-batch in one stage."""
    counts = _blocks_that_keep(layout.recompute, chunk.dense, chunk.moe)
    return sum(count * kept[moe][again] for (moe, again), count in counts.items())


@functools.lru_cache(maxsize=4096)
def _blocks_that_keep(policy: str, dense: int, moe: int) -> dict[tuple[bool, bool], int]:
    """How many blocks of a stage, dense ones first, keep what: by (with experts, what the policy leaves)."""
    segments = recompute_of(policy).segments(dense + moe)
    repeated = {index for segment in segments for index in segment}
    keep = [(segment.start >= dense, True) for segment in segments]
    keep += [(index >= dense, False) for index in range(dense + moe) if index not in repeated]
    return dict(Counter(keep))


def _blocks_at_once(layout: Layout, chunks: dict[int, Chunk]) -> int:
    """Blocks that a backward makes again together: with sqrt a whole segment."""
    longest = max((chunk.layers for chunk in chunks.values()), default=0)
    return max((len(segment) for segment in recompute_of(layout.recompute).segments(longest)), default=0)


def _recompute(layout: Layout, none: float, some: float, *, stream: float, blocks: int) -> tuple[float, float]:
    """What a block's backward finds, and what it makes again."""
    if layout.recompute == "sqrt":
        return stream, blocks * none - stream
    return some, max(0.0, none - some)


def _working(subject: Subject, tokens: float, width: int, style: Style, *, moe: bool, stream: float) -> float:
    """Temporaries where a block's backward is at its fullest: beside the gradient of its output, those of the MLP's
    inner tensors, or of the attention scores."""
    model, layout = subject.model, subject.layout
    inner = model.ffn / layout.tp
    if moe and style.wide_router:
        own = 1 / layout.tp if subject.sequence_parallel else 1.0
        return stream + tokens * weighing_bytes(model, layout, width, own)
    if moe and model.experts:
        inner = model.experts.top_k * model.experts.ffn / layout.tp
    tensors = 2 if model.activation == "swiglu" else 1
    attention = 2 * model.heads / layout.tp * subject.sequence if style.scores else 0.0
    return stream + width * tokens * max(inner * tensors, attention)
