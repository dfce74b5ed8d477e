"""The time of one optimizer step, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.planner.collectives import hop_seconds
from shardwise.planner.compute import Speed
from shardwise.planner.parameters import layer_parameters, outer_parameters
from shardwise.planner.pipeline import simulate
from shardwise.planner.schedules import order, stages_of, steady_micro_batches
from shardwise.planner.stacks import Stack
from shardwise.planner.subject import Subject
from shardwise.planner.traffic import DataTraffic, context_seconds, data_traffic, expert_seconds, tensor_seconds
from shardwise.planner.work import Work, block_work, head_work


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
    data: DataTraffic
    hop: float  # from one pipeline rank to the next
    optimizer: float


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
        layout, model, stack = subject.layout, subject.model, subject.stack
        tokens = layout.micro_batch * subject.sequence / layout.cp
        data = self._data_of(subject)
        dense = model.experts.dense_layers if model.experts else 0
        first, last = self._layer(subject, tokens, 0), self._layer(subject, tokens, model.layers - 1)

        stages = layout.pp * layout.virtual_stages if layout.pp > 1 else 1
        costs = [
            (
                _beside(kind.forward, data.gather_forward, stack),
                _beside(kind.backward, data.gather_backward + data.reduce, stack),
            )
            for kind in (first, last)
        ]
        forward, backward = [0.0] * stages, [0.0] * stages
        for stage in range(stages):
            begin, end = -(-stage * model.layers // stages), -(-(stage + 1) * model.layers // stages)
            few = max(0, min(end, dense) - begin)
            forward[stage] = few * costs[0][0] + (end - begin - few) * costs[1][0]
            backward[stage] = few * costs[0][1] + (end - begin - few) * costs[1][1]
        head = self._head(subject, tokens)
        forward[-1] += head[0]
        backward[-1] += head[1]
        busy, total, bubble = _simulated(subject, forward, backward, tokens)

        hidden = min(data.once * stack.hides_data, max(backward) * (layout.virtual_stages if stages > 1 else 1))
        once = data.once - hidden * (1 - stack.slowdown)
        optimizer = _optimizer_seconds(subject, self._speed)
        count = model.layers / layout.pp * subject.micro_batches
        inside = last.tensor + last.context + last.expert + last.recompute
        exposed = sum(kind_cost - kind for kind_cost, kind in zip(costs[1], (last.forward, last.backward), strict=True))
        parts = {
            "compute": busy - count * (inside + exposed),
            "recompute": count * last.recompute,
            "tensor": count * last.tensor,
            "context": count * last.context,
            "expert": count * last.expert,
            "data": once + count * exposed,
            "bubble": total - busy,
            "optimizer": optimizer,
        }
        return StepTime(total + once + optimizer + stack.step_overhead_seconds, parts, bubble)

    def pieces(self, subject: Subject) -> Pieces:
        """The durations that `predict` puts together."""
        model = subject.model
        tokens = subject.layout.micro_batch * subject.sequence / subject.layout.cp
        return Pieces(
            layers=(self._layer(subject, tokens, 0), self._layer(subject, tokens, model.layers - 1)),
            dense_layers=model.experts.dense_layers if model.experts else 0,
            head=self._head(subject, tokens),
            data=self._data_of(subject),
            hop=_hop(subject, tokens),
            optimizer=_optimizer_seconds(subject, self._speed),
        )

    def estimate(self, subject: Subject, micro_batches: int, schedules: list[tuple[str, int]]) -> list[float]:
        """Seconds of a step under each (schedule, virtual stages), for ranking many: as `predict`, with closed-form
        bubbles and a pipeline cut into equal numbers of layers."""
        layout, model, stack = subject.layout, subject.model, subject.stack
        tokens = layout.micro_batch * subject.sequence / layout.cp
        data, layer = self._data_of(subject), self._layer(subject, tokens, model.layers - 1)
        forward = _beside(layer.forward, data.gather_forward, stack)
        each = forward + _beside(layer.backward, data.gather_backward + data.reduce, stack)
        head, layers, ranks = sum(self._head(subject, tokens)), model.layers, layout.pp
        once = data.once * (1 - stack.hides_data * (1 - stack.slowdown))
        fixed = once + _optimizer_seconds(subject, self._speed) + stack.step_overhead_seconds
        seconds = []
        for schedule, virtual in schedules:
            stages = ranks * virtual
            full = -(-layers // stages)  # layers of the fullest stage
            last = full * (virtual - 1) + max(0, layers - full * (stages - 1)) if schedule != "zbv" else full
            busy = micro_batches * max(virtual * full * each, last * each + head, (layers * each + head) / ranks)
            bubble = (ranks - 1) * (layers * each + head) / ranks * bubble_share(schedule, virtual)
            seconds.append(busy + bubble + fixed)
        return seconds

    def _layer(self, subject: Subject, tokens: float, index: int) -> _Layer:
        layout, stack, model = subject.layout, subject.stack, subject.model
        dense = model.experts is None or index < model.experts.dense_layers
        key = (dense, tokens, layout.tp, layout.cp, layout.ep, subject.recompute, layout.async_tp)
        if key in self._layers:
            return self._layers[key]
        speed, again = self._speed, subject.recompute
        work = block_work(model, layout, tokens, subject.sequence, layer=index)
        work = replace(
            work,
            attention_flops=work.attention_flops * (stack.context_imbalance if layout.cp > 1 else 1.0),
            traffic_bytes=work.traffic_bytes * stack.traffic,
        )
        recompute = speed.forward_seconds(
            Work(
                tuple(replace(gemm, count=gemm.count * again.gemm) for gemm in work.gemms if again.gemm),
                work.attention_flops * again.attention,
                work.traffic_bytes * again.traffic,
            )
        )
        hides_tensor = max(stack.hides_tensor, 0.6 if layout.async_tp else 0.0)
        tensor = (1 - hides_tensor) * tensor_seconds(subject, tokens, recomputed=again.gemm >= 1)
        context = (1 - stack.hides_context) * context_seconds(subject, tokens)
        expert = 0.0 if dense else (1 - stack.hides_expert) * expert_seconds(subject, tokens, again.gemm >= 1)
        third = (tensor + context + expert) / 3
        overhead = stack.layer_overhead_seconds + (0.0 if dense else stack.expert_overhead_seconds)
        self._layers[key] = _Layer(
            forward=speed.forward_seconds(work) + third + overhead,
            backward=speed.backward_seconds(work) + recompute + 2 * third + 2 * overhead,
            tensor=tensor,
            context=context,
            expert=expert,
            recompute=recompute,
        )
        return self._layers[key]

    def _head(self, subject: Subject, tokens: float) -> tuple[float, float]:
        """Forward and backward of output head and loss."""
        key = (tokens, subject.layout.tp)
        if key not in self._heads:
            work, speed = head_work(subject.model, subject.layout, tokens), self._speed
            once = work.traffic_bytes / speed.bytes_per_second  # the backward moves as much as the forward, not twice
            self._heads[key] = (
                speed.forward_seconds(work, head=True),
                speed.backward_seconds(work, head=True) - once,
            )
        return self._heads[key]

    def _data_of(self, subject: Subject) -> DataTraffic:
        layout = subject.layout
        key = (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp, layout.ep, layout.zero)
        if key not in self._data:
            self._data[key] = data_traffic(subject)
        return self._data[key]


def _beside(compute: float, communication: float, stack: Stack) -> float:
    """Compute with communication that may hide behind it."""
    hidden = communication * stack.hides_data
    exposed = communication - hidden
    return max(compute + stack.slowdown * min(hidden, compute), hidden) + exposed


def _simulated(
    subject: Subject, forward: list[float], backward: list[float], tokens: float
) -> tuple[float, float, float]:
    """Busy seconds of the busiest rank, seconds of all micro-batches through the pipeline, bubble share."""
    layout, micro_batches = subject.layout, subject.micro_batches
    if layout.pp == 1:
        busy = micro_batches * (forward[0] + backward[0])
        return busy, busy, 0.0
    ranks = [stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank) for rank in range(layout.pp)]
    per_micro_batch = [sum(forward[stage] + backward[stage] for stage in stages) for stages in ranks]
    few = steady_micro_batches(layout.schedule, layout.pp, micro_batches)
    seconds: dict[tuple[int, str], float] = {}
    for stage, (f, b) in enumerate(zip(forward, backward, strict=True)):
        seconds |= {(stage, "F"): f, (stage, "B"): b, (stage, "I"): b / 2, (stage, "W"): b / 2}
    run = simulate(order(layout.schedule, layout.pp, few, layout.virtual_stages), seconds, _hop(subject, tokens))
    total = run.seconds + (micro_batches - few) * max(per_micro_batch)
    busy = micro_batches * max(per_micro_batch)
    return busy, total, 1 - micro_batches * sum(per_micro_batch) / layout.pp / total


def _hop(subject: Subject, tokens: float) -> float:
    """Seconds that a micro-batch's activations take from one pipeline rank to the next."""
    layout, gpu = subject.layout, subject.cluster.gpu
    payload = 2 * tokens * subject.model.hidden / (layout.tp if subject.sequence_parallel else 1)
    stride = layout.tp * layout.cp * layout.data_ranks
    return hop_seconds(gpu, payload, across=stride >= gpu.domain)


def bubble_share(schedule: str, virtual: int) -> float:
    """The bubble over that of 1F1B, whose ranks each wait for (p - 1) micro-batches."""
    shares = {"interleaved": 1 / virtual, "interleaved-zb": 0.5 / virtual, "zbv": 0.15, "dualpipev": 0.3}
    return shares.get(schedule, 1.0)


def _optimizer_seconds(subject: Subject, speed: Speed) -> float:
    """AdamW reads and writes about 30 bytes per parameter that the rank updates."""
    layout = subject.layout
    held = layer_parameters(subject.model, layout, subject.model.layers - 1) * subject.model.layers / layout.pp
    held += outer_parameters(subject.model, layout)
    sharded = layout.dp_shard * layout.cp if layout.zero else 1
    if layout.zero == 1:
        sharded = layout.data_ranks * layout.cp
    return 30 * held / sharded / speed.bytes_per_second
