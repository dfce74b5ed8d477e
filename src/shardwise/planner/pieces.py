"""Of what one rank's step consists: the durations of a layer, the head, the embedding, the exchanges and the update."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.planner.collectives import group_of, hop_seconds, ring_seconds
from shardwise.planner.host import host_seconds, waiting_seconds
from shardwise.planner.memory.units import CHUNKS
from shardwise.planner.offload import (
    Copies,
    host_update_seconds,
    layer_copies,
    step_copies,
    updated_parameters,
)
from shardwise.planner.parameters import layer_parameters, outer_parameters
from shardwise.planner.subject import Subject
from shardwise.planner.traffic import DataTraffic, context_seconds, data_traffic, expert_seconds, tensor_seconds
from shardwise.planner.work import Scores, Work, block_work, head_work


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
    host: float = 0.0  # the device waits for it, in the whole step


class PiecesModel:
    """The pieces of subjects that differ in layout, micro-batches and recompute only, remembered.

    A layer is its products, attention and traffic at the stack's rates, plus what tensor, context and expert
    parallelism expose.
    """

    def __init__(self, subject: Subject):
        self._speed = subject.stack.speed(subject.cluster.gpu, subject.dtype)
        self._layers: dict[tuple[object, ...], _Layer] = {}
        self._heads: dict[tuple[object, ...], tuple[float, float]] = {}
        self._data: dict[tuple[object, ...], DataTraffic] = {}

    def pieces(self, subject: Subject) -> Pieces:
        """The durations that `predict` puts together."""
        model, layout = subject.model, subject.layout
        tokens = layout.micro_batch * subject.sequence / layout.cp
        dense = model.experts.dense_layers if model.experts else 0
        updated = updated_parameters(subject)
        on_host = layout.offload in ("optimizer", "parameters")
        table = model.vocabulary * model.hidden / layout.tp
        layers = (self._whole_layer(subject, tokens, 0), self._whole_layer(subject, tokens, model.layers - 1))
        head = self._whole_head(subject, tokens, table)
        embedding = self._embedding(subject, tokens, table)
        optimizer = host_update_seconds(subject, updated) if on_host else self._speed.update_seconds(updated)
        waits, optimizer = self._host(subject, layers, (sum(embedding), sum(head)), optimizer)
        return Pieces(
            layers=layers,
            dense_layers=dense,
            head=head,
            embedding=embedding,
            data=self._data_of(subject),
            copies=(
                self._copies(subject, 0, moe=model.experts is not None and not dense),
                self._copies(subject, model.layers - 1, moe=model.experts is not None),
            ),
            hop=_hop(subject, tokens),
            optimizer=optimizer,
            copied_once=step_copies(subject, updated),
            host=waits,
        )

    def _host(
        self, subject: Subject, layers: tuple[_Layer, _Layer], outer: tuple[float, float], optimizer: float
    ) -> tuple[float, float]:
        """How long the device waits for the host in a step, and the update with the host's part, where they add up."""
        times, model, layout = self._speed.host, subject.model, subject.layout
        if times is None or not times.layers:
            return 0.0, optimizer
        dense = model.experts.dense_layers if model.experts else model.layers
        kinds = [
            (count / layout.pp, host_seconds(times, model, layout, moe=moe), layer.forward, layer.backward)
            for count, moe, layer in ((dense, False, layers[0]), (model.layers - dense, True, layers[1]))
            if count
        ]
        if times.serial:  # a layer's own are in its seconds
            return 0.0, optimizer + sum(count * seconds.update for count, seconds, *_ in kinds)
        if layout.pp > 1:
            outer = (0.0, 0.0)
        return waiting_seconds(subject, times, kinds, outer, optimizer), optimizer

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
        # Two gathers and two scatters each way reorder what they send or receive, where the sequence is not the first
        # dimension (parallel/collectives.py).
        moved = 4 * speed.copy_seconds(tokens * model.hidden) if layout.tp > 1 and subject.sequence_parallel else 0.0
        recompute += moved * (again.gemm >= 1)
        overhead = stack.layer_overhead_seconds + (0.0 if dense else stack.expert_overhead_seconds)
        self._layers[key] = _Layer(
            forward=speed.forward_seconds(work) + rotation[0] + third + moved + overhead,
            backward=speed.backward_seconds(work) + rotation[1] + recompute + 2 * third + moved + 2 * overhead,
            tensor=tensor,
            context=context,
            expert=expert,
            recompute=recompute,
        )
        return self._layers[key]

    def _whole_layer(self, subject: Subject, tokens: float, index: int) -> _Layer:
        """With what depends on how weights are held: FSDP2's copies, or casts where it does not gather them."""
        layout, model, again = subject.layout, subject.model, subject.recompute
        speed, layer = self._speed.under(compiled=layout.compile), self._layer(subject, tokens, index)
        forward, backward = layer.forward, layer.backward
        parameters = layer_parameters(model, layout, index)
        if layout.zero < 2:
            casts = speed.cast_seconds(parameters, 1 - 1 / subject.micro_batches)
            forward, backward = forward + casts[0], backward + casts[1] + again.gemm * casts[0]
        else:
            gather, reduce = speed.unit_seconds(parameters, layout.dp_shard * layout.cp)
            forward, backward = forward + gather * (layout.zero == 3), backward + gather * (layout.zero == 3) + reduce
        if speed.host and speed.host.serial:
            moe = model.experts is not None and index >= model.experts.dense_layers
            own = host_seconds(speed.host, model, layout, moe=moe)
            forward, backward = forward + own.forward, backward + own.backward
        return replace(layer, forward=forward, backward=backward)

    def _whole_head(self, subject: Subject, tokens: float, weights: float) -> tuple[float, float]:
        forward, backward = self._head(subject, tokens)
        layout = subject.layout
        if layout.zero >= 2:
            first, second = self._speed.unit_seconds(weights, layout.dp_shard * layout.cp)
        else:
            first, second = self._speed.cast_seconds(weights, 1 - 1 / subject.micro_batches)
        return forward + first, backward + second

    def _embedding(self, subject: Subject, tokens: float, weights: float) -> tuple[float, float]:
        model, layout = subject.model, subject.layout
        again = model.tied or subject.micro_batches > 1
        forward, backward = self._speed.embedding_seconds(tokens * model.hidden / layout.tp, weights, again=again)
        if layout.zero >= 2 and not model.tied:  # a tied table is gathered and reduced once, with the head
            gather, reduce = self._speed.unit_seconds(weights, layout.dp_shard * layout.cp)
            forward, backward = forward + gather, backward + gather * (layout.zero == 3) + reduce
        return forward, backward

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
            self._data[key] = self._with_outer(subject, data_traffic(subject))
        return self._data[key]

    def _with_outer(self, subject: Subject, data: DataTraffic) -> DataTraffic:
        """Where rates were measured: every micro-batch's exchange of embedding and head too, which the constants of a
        stack hold implicitly; and zero 2's copies around its gathers, once a step."""
        layout, model, gpu = subject.layout, subject.model, subject.cluster.gpu
        shards, outer = layout.dp_shard * layout.cp, outer_parameters(model, layout)
        if layout.zero < 2 or not self._speed.measured:
            return data
        group = group_of(gpu, shards, layout.tp)
        first = ring_seconds(gpu, group, outer * subject.gather_bytes)
        last = subject.micro_batches * ring_seconds(gpu, group, outer * subject.gradient_bytes, "reduce_scatter")
        if layout.zero == 3:  # the embedding is gathered twice, the head stays
            return replace(data, once=data.once + 1.5 * subject.micro_batches * first + last)
        gather, _ = self._speed.unit_seconds(layer_parameters(model, layout, model.layers - 1), shards)
        return replace(data, once=data.once + first + last + gather * model.layers / layout.pp)


def _scaled_scores(work: Work, share: float) -> tuple[Scores, ...]:
    return tuple(replace(item, flops=item.flops * share) for item in work.scores)


def _hop(subject: Subject, tokens: float) -> float:
    """Seconds that a micro-batch's activations take from one pipeline rank to the next."""
    layout, gpu = subject.layout, subject.cluster.gpu
    payload = subject.activation_bytes * tokens * subject.model.hidden / (layout.tp if subject.sequence_parallel else 1)
    stride = layout.tp * layout.cp * layout.data_ranks
    return hop_seconds(gpu, payload, across=stride >= gpu.domain)
