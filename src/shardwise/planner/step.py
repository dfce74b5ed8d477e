"""The time of one optimizer step, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.planner.collectives import group_of, hop_seconds, ring_seconds
from shardwise.planner.memory.units import CHUNKS
from shardwise.planner.offload import (
    Copies,
    host_update_seconds,
    layer_copies,
    step_copies,
    updated_parameters,
)
from shardwise.planner.parameters import layer_parameters, outer_parameters
from shardwise.planner.pipeline import simulate
from shardwise.planner.schedules import order, stages_of, steady_micro_batches
from shardwise.planner.stacks import Stack
from shardwise.planner.stages import cut_of, cuts_by_cost
from shardwise.planner.subject import Subject
from shardwise.planner.traffic import DataTraffic, context_seconds, data_traffic, expert_seconds, tensor_seconds
from shardwise.planner.work import Scores, Work, block_work, head_work


@dataclass(frozen=True)
class StepTime:
    """`seconds` of one step; `parts` are what the busiest rank spends, by kind, exposed time only."""

    seconds: float
    parts: dict[str, float]
    bubble_fraction: float


@dataclass(frozen=True)
class _Layer:
    """Seconds of one layer and one micro-batch on one rank, and in them what nothing hides."""

    forward: float
    backward: float
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    recompute: float = 0.0


@dataclass(frozen=True)
class Pieces:
    """Of what one rank's step consists, in seconds, for whoever draws it (`planner/rank_timeline.py`)."""

    layers: tuple[_Layer, _Layer]  # the first, and the last
    dense_layers: int  # how many are of the first one's kind; where all are alike, 0
    head: tuple[float, float]  # output head and loss: forward, backward
    embedding: tuple[float, float]
    data: DataTraffic
    copies: tuple[Copies, Copies]  # to and from the host, of the first and the last layer
    hop: float  # from one pipeline rank to the next
    optimizer: float
    copied_once: float  # between the last backward and the end of the step: gradients and parameters


def predict_step(subject: Subject) -> StepTime:
    """The step of one Subject; `StepModel` predicts many that share all but the layout."""
    return StepModel(subject).predict(subject)


class StepModel:
    """Predicts the steps of subjects that differ in layout, micro-batches and recompute only, remembering their parts.

    A layer is its products, attention and traffic at the stack's rates, plus what tensor, context and expert
    parallelism expose. Data parallelism hides behind the layers of a micro-batch as far as they last. Stages run
    through the pipeline's own schedule.
    """

    def __init__(self, subject: Subject):
        self._speed = subject.stack.speed(subject.cluster.gpu, subject.dtype)
        self._layers: dict[tuple[object, ...], _Layer] = {}
        self._heads: dict[tuple[object, ...], tuple[float, float]] = {}
        self._data: dict[tuple[object, ...], DataTraffic] = {}

    def predict(self, subject: Subject) -> StepTime:
        """The step, its pipeline simulated."""
        layout, stack = subject.layout, subject.stack
        pieces = self.pieces(subject)
        data, dense, last = pieces.data, pieces.dense_layers, pieces.layers[1]
        stages = layout.pp * layout.virtual_stages if layout.pp > 1 else 1
        without = [
            (
                beside(kind.forward, data.gather_forward, stack),
                beside(kind.backward, data.gather_backward + data.reduce, stack),
            )
            for kind in pieces.layers
        ]
        costs = [
            (forward + copies.forward, backward + copies.backward)
            for (forward, backward), copies in zip(without, pieces.copies, strict=True)
        ]
        forward, backward = [0.0] * stages, [0.0] * stages
        cut = cut_of(subject, stages)
        for stage, here in enumerate(cut):
            few = max(0, min(here.stop, dense) - here.start)
            forward[stage] = few * costs[0][0] + (len(here) - few) * costs[1][0]
            backward[stage] = few * costs[0][1] + (len(here) - few) * costs[1][1]
        forward[0] += pieces.embedding[0]
        backward[0] += pieces.embedding[1]
        forward[-1] += pieces.head[0]
        backward[-1] += pieces.head[1]
        busy, total, bubble, busiest = _simulated(subject, forward, backward, pieces.hop)

        hidden = min(data.once * stack.hides_data, max(backward) * (layout.virtual_stages if stages > 1 else 1))
        once = data.once - hidden * (1 - stack.slowdown)
        count = sum(len(cut[stage]) for stage in busiest) * subject.micro_batches
        inside = last.tensor + last.context + last.expert + last.recompute
        exposed = sum(without[1]) - last.forward - last.backward
        copied = sum(costs[1]) - sum(without[1])
        parts = {
            "compute": busy - count * (inside + exposed + copied),
            "recompute": count * last.recompute,
            "tensor": count * last.tensor,
            "context": count * last.context,
            "expert": count * last.expert,
            "data": once + count * exposed,
            "offload": pieces.copied_once + count * copied,
            "bubble": total - busy,
            "optimizer": pieces.optimizer,
        }
        after = once + pieces.copied_once + pieces.optimizer
        return StepTime(total + after + stack.step_overhead_seconds, parts, bubble)

    def pieces(self, subject: Subject) -> Pieces:
        """The durations that `predict` puts together."""
        model, layout = subject.model, subject.layout
        tokens = layout.micro_batch * subject.sequence / layout.cp
        dense = model.experts.dense_layers if model.experts else 0
        updated = updated_parameters(subject)
        on_host = layout.offload in ("optimizer", "parameters")
        table = model.vocabulary * model.hidden / layout.tp
        again = model.tied or subject.micro_batches > 1
        return Pieces(
            layers=(self._whole_layer(subject, tokens, 0), self._whole_layer(subject, tokens, model.layers - 1)),
            dense_layers=dense,
            head=self._whole_head(subject, tokens, table),
            embedding=self._speed.embedding_seconds(tokens * model.hidden / layout.tp, table, again=again),
            data=self._data_of(subject),
            copies=(
                self._copies(subject, 0, moe=model.experts is not None and not dense),
                self._copies(subject, model.layers - 1, moe=model.experts is not None),
            ),
            hop=_hop(subject, tokens),
            optimizer=host_update_seconds(subject, updated) if on_host else self._speed.update_seconds(updated),
            copied_once=step_copies(subject, updated),
        )

    def _copies(self, subject: Subject, layer: int, *, moe: bool) -> Copies:
        return layer_copies(subject, moe=moe, parameters=layer_parameters(subject.model, subject.layout, layer))

    def _layer(self, subject: Subject, tokens: float, index: int) -> _Layer:
        layout, stack, model = subject.layout, subject.stack, subject.model
        dense = model.experts is None or index < model.experts.dense_layers
        # Ulysses attends to whole sequences of some heads, with the kernel of full attention.
        imbalance = stack.context_imbalance if layout.cp > 1 and layout.cp_method != "ulysses" else 1.0
        key = (dense, tokens, layout.tp, layout.cp, imbalance, layout.ep, subject.recompute, layout.async_tp,
               layout.compile)  # fmt: skip
        if key in self._layers:
            return self._layers[key]
        speed, again = self._speed.under(compiled=layout.compile), subject.recompute
        work = block_work(model, layout, tokens, subject.sequence, layer=index)
        work = replace(
            work,
            attention_flops=work.attention_flops * imbalance,
            scores=_scaled_scores(work, imbalance),
            traffic_bytes=work.traffic_bytes * stack.traffic,
        )
        recompute = speed.forward_seconds(
            Work(
                tuple(replace(gemm, count=gemm.count * again.gemm) for gemm in work.gemms if again.gemm),
                work.attention_flops * again.attention,
                work.traffic_bytes * again.traffic,
                elements=tuple(
                    replace(item, forward=item.forward * again.traffic, backward=0.0) for item in work.elements
                ),
                scores=_scaled_scores(work, again.attention),
            )
        )
        hides_tensor = max(stack.hides_tensor, 0.6 if layout.async_tp else 0.0)
        rotation = speed.rotation_seconds(work, stack.rotation(speed.width))
        recompute += again.traffic * rotation[0]
        tensor = (1 - hides_tensor) * tensor_seconds(subject, tokens, recomputed=again.gemm >= 1)
        context = (1 - stack.hides_context) * context_seconds(subject, tokens)
        expert = 0.0 if dense else (1 - stack.hides_expert) * expert_seconds(subject, tokens, again.gemm >= 1)
        third = (tensor + context + expert) / 3
        overhead = stack.layer_overhead_seconds + (0.0 if dense else stack.expert_overhead_seconds)
        self._layers[key] = _Layer(
            forward=speed.forward_seconds(work) + rotation[0] + third + overhead,
            backward=speed.backward_seconds(work) + rotation[1] + recompute + 2 * third + 2 * overhead,
            tensor=tensor,
            context=context,
            expert=expert,
            recompute=recompute,
        )
        return self._layers[key]

    def _whole_layer(self, subject: Subject, tokens: float, index: int) -> _Layer:
        """With what depends on how weights are held: casts where FSDP2 does not gather them, and the host's time."""
        layout, model, again = subject.layout, subject.model, subject.recompute
        speed, layer = self._speed.under(compiled=layout.compile), self._layer(subject, tokens, index)
        forward, backward = layer.forward, layer.backward
        if layout.zero < 2:
            parameters = layer_parameters(model, layout, index)
            casts = speed.cast_seconds(parameters, 1 - 1 / subject.micro_batches)
            forward, backward = forward + casts[0], backward + casts[1] + again.gemm * casts[0]
        moe = model.experts is not None and index >= model.experts.dense_layers
        forward, backward = speed.host_bound(forward, backward, moe=moe, unit=layout.zero >= 2, again=again.traffic)
        return replace(layer, forward=forward, backward=backward)

    def _whole_head(self, subject: Subject, tokens: float, weights: float) -> tuple[float, float]:
        forward, backward = self._head(subject, tokens)
        if subject.layout.zero >= 2:
            return forward, backward
        casts = self._speed.cast_seconds(weights, 1 - 1 / subject.micro_batches)
        return forward + casts[0], backward + casts[1]

    def _head(self, subject: Subject, tokens: float) -> tuple[float, float]:
        """Forward and backward of output head and loss."""
        layout = subject.layout
        key = (tokens, layout.tp, layout.loss)
        if key not in self._heads:
            pieces = CHUNKS if layout.loss == "chunked" else 1
            work = head_work(subject.model, layout, tokens / pieces)
            self._heads[key] = self._speed.head_seconds(work, pieces)
        return self._heads[key]

    def _data_of(self, subject: Subject) -> DataTraffic:
        layout = subject.layout
        spread = (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp, layout.ep, layout.zero)
        key = (*spread, subject.micro_batches)
        if key not in self._data:
            self._data[key] = self._with_copies(subject, data_traffic(subject))
        return self._data[key]

    def _with_copies(self, subject: Subject, data: DataTraffic) -> DataTraffic:
        """Where rates were measured: FSDP2's copies around its exchanges, which run on their streams; and every
        micro-batch's exchange of embedding and head, which the constants of a stack hold implicitly."""
        layout, model = subject.layout, subject.model
        shards, outer = layout.dp_shard * layout.cp, outer_parameters(model, layout)
        if layout.zero < 2 or not self._speed.measured:
            return data
        gather, reduce = self._speed.unit_seconds(layer_parameters(model, layout, model.layers - 1), shards)
        first, last = self._speed.unit_seconds(outer, shards)
        group = group_of(subject.cluster.gpu, shards, layout.tp)
        first += ring_seconds(subject.cluster.gpu, group, outer * subject.gather_bytes)
        last += ring_seconds(subject.cluster.gpu, group, outer * subject.gradient_bytes, "reduce_scatter")
        count = subject.micro_batches
        if layout.zero == 3:  # the embedding is gathered twice, the head stays
            return DataTraffic(
                data.gather_forward + gather,
                data.gather_backward + gather,
                data.reduce + reduce,
                data.once + count * (1.5 * first + last),
            )
        once = data.once + first + count * last + gather * model.layers / layout.pp
        return DataTraffic(0.0, 0.0, data.reduce + reduce, once)


def beside(compute: float, communication: float, stack: Stack) -> float:
    """Compute with communication that may hide behind it."""
    hidden = communication * stack.hides_data
    exposed = communication - hidden
    return max(compute + stack.slowdown * min(hidden, compute), hidden) + exposed


def _scaled_scores(work: Work, share: float) -> tuple[Scores, ...]:
    return tuple(replace(item, flops=item.flops * share) for item in work.scores)


def _simulated(
    subject: Subject, forward: list[float], backward: list[float], hop: float
) -> tuple[float, float, float, list[int]]:
    """Busy seconds of the busiest rank, seconds of all micro-batches through the pipeline, bubble share, and the
    busiest rank's stages."""
    layout, micro_batches = subject.layout, subject.micro_batches
    if layout.pp == 1:
        busy = micro_batches * (forward[0] + backward[0])
        return busy, busy, 0.0, [0]
    ranks = [stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank) for rank in range(layout.pp)]
    per_micro_batch = [sum(forward[stage] + backward[stage] for stage in stages) for stages in ranks]
    few = steady_micro_batches(layout.schedule, layout.pp, micro_batches)
    seconds: dict[tuple[int, str], float] = {}
    for stage, (f, b) in enumerate(zip(forward, backward, strict=True)):
        seconds |= {(stage, "F"): f, (stage, "B"): b, (stage, "I"): b / 2, (stage, "W"): b / 2}

    def run(count: int) -> float:
        return simulate(order(layout.schedule, layout.pp, count, layout.virtual_stages), seconds, hop).seconds

    total = run(few)
    if few < micro_batches:
        period = max(per_micro_batch)
        if cuts_by_cost(subject.stack):
            # The busiest rank may be any, so that hops show: a round more takes what the last one took. The constants
            # of other stacks were fitted without it (their last rank, which has the head, is the busiest).
            period = (total - run(few - layout.pp)) / layout.pp
        total += (micro_batches - few) * period
    busy = micro_batches * max(per_micro_batch)
    busiest = ranks[per_micro_batch.index(max(per_micro_batch))]
    return busy, total, 1 - micro_batches * sum(per_micro_batch) / layout.pp / total, busiest


def _hop(subject: Subject, tokens: float) -> float:
    """Seconds that a micro-batch's activations take from one pipeline rank to the next."""
    layout, gpu = subject.layout, subject.cluster.gpu
    payload = subject.activation_bytes * tokens * subject.model.hidden / (layout.tp if subject.sequence_parallel else 1)
    stride = layout.tp * layout.cp * layout.data_ranks
    return hop_seconds(gpu, payload, across=stride >= gpu.domain)
