"""The predicted Timeline of one rank: the durations of `planner/step.py`, laid out.

Within a layer, what tensor, context and expert parallelism expose stands between the halves of its compute; what they
hide, beside the compute before it. FSDP's gather of the next layer and its reduction of the last gradients run beside
the layer and end with it, so that what does not fit behind the compute sticks out at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwise.planner.pieces import Pieces
from shardwise.planner.pipeline import PipelineRun, simulate
from shardwise.planner.schedules import Action, order, stages_of
from shardwise.planner.stages import cut_of
from shardwise.planner.step import StepModel
from shardwise.planner.subject import Subject
from shardwise.timeline import Box, Span, Timeline


def predict_timeline(subject: Subject, rank: int = 0, *, model: StepModel | None = None) -> Timeline:
    """What `rank` (of the world) does over one step. Its `seconds` are those of `StepModel.predict`, up to what that
    one saves by simulating three rounds of a long pipeline only.

    Raises ValueError where there is no such rank, or where the schedule cannot do the number of micro-batches.
    """
    layout, stack = subject.layout, subject.stack
    if not 0 <= rank < layout.world:
        raise ValueError(f"rank {rank}: the layout has ranks 0 to {layout.world - 1}")
    pieces = (model or StepModel(subject)).pieces(subject)
    stages = _stages(subject, pieces)
    place = rank * layout.pp // layout.world  # pipeline is the outermost dimension
    run = _run(subject, pieces, stages)
    actions = run.spans[place]
    spans = list(_receives(run, place, pieces.hop))
    templates: dict[tuple[int, str], list[Span]] = {}
    for (stage, kind, micro_batch), begin, _ in actions:
        template = templates.setdefault((stage, kind), list(stages[stage].spans(kind)))
        spans += [
            Span(stream, begin + start, begin + end, f"{name} micro-batch {micro_batch}")
            for stream, start, end, name in template
        ]
    clock = run.seconds
    once, longest = pieces.data.once, max(stage.seconds("B") for stage in stages)
    hidden = min(once * stack.hides_data, longest * (layout.virtual_stages if layout.pp > 1 else 1))
    added = once - hidden * (1 - stack.slowdown)
    if once:
        stream, name = _once(subject)
        spans.append(Span(stream, max(0.0, clock + added - once), clock + added, name))
    clock += added
    if pieces.copied_once:
        spans.append(Span("copy", clock, clock + pieces.copied_once, "offloaded gradients and parameters"))
        clock += pieces.copied_once
    spans.append(Span("compute", clock, clock + pieces.optimizer, "optimizer"))
    clock += pieces.optimizer + pieces.host + stack.step_overhead_seconds  # where it waits for the host is not told
    return Timeline.build(spans, seconds=clock, rank=rank).with_idle()


def predict_schedule(subject: Subject) -> list[list[Box]]:
    """Every pipeline rank's actions over one step, for `timeline.schedule_svg`."""
    layout = subject.layout
    pieces = StepModel(subject).pieces(subject)
    run = _run(subject, pieces, _stages(subject, pieces))
    rows = []
    for place, spans in enumerate(run.spans):
        held = stages_of(layout.schedule, layout.pp, layout.virtual_stages, place) if layout.pp > 1 else [0]
        rows.append(
            [Box(action.kind, action.micro_batch, held.index(action.stage), start, end) for action, start, end in spans]
        )
    return rows


class _Part(NamedTuple):
    """One layer's pass in one direction, or the head's: where it lies in its stage's action does not matter."""

    name: str
    compute: float
    again: float  # of the compute, what is recomputed; it comes first
    between: tuple[tuple[str, float, float], ...]  # stream, exposed seconds, hidden seconds
    beside: tuple[tuple[str, float, str], ...]  # stream, seconds, name
    copied: float = 0.0  # to or from the host; nothing else runs meanwhile

    def lay(self, hides: float, slowdown: float) -> tuple[list[Span], float]:
        """Spans from 0 on, and the end."""
        traffic = sum(seconds for _, seconds, _ in self.beside)
        inside = sum(exposed for _, exposed, _ in self.between)
        whole = self.compute + inside
        busy = whole + slowdown * min(hides * traffic, whole)  # hidden traffic slows the compute down
        total = max(busy, hides * traffic) + (1 - hides) * traffic
        stretch = (busy - inside) / self.compute if self.compute else 1.0
        spans, clock = [], 0.0
        if self.again:
            clock = self.again * stretch
            spans.append(Span("compute", 0.0, clock, f"recompute {self.name}"))
        share = (self.compute - self.again) * stretch / (len(self.between) or 1)
        for stream, exposed, hidden in self.between or (("", 0.0, 0.0),):
            spans.append(Span("compute", clock, clock + share, self.name))
            clock += share
            if stream:
                spans.append(Span(stream, max(0.0, clock - hidden), clock + exposed, f"{stream} of {self.name}"))
                clock += exposed
        clock = total - traffic
        for stream, seconds, name in self.beside:
            spans.append(Span(stream, clock, clock + seconds, name))
            clock += seconds
        if self.copied:
            spans.append(Span("copy", total, total + self.copied, f"offload of {self.name}"))
        return spans, total + self.copied


class _Stage:
    """The passes of one stage's layers for one micro-batch."""

    def __init__(self, forward: list[_Part], backward: list[_Part], hides: float, slowdown: float):
        self._parts = {"F": forward, "B": backward}
        self._hides, self._slowdown = hides, slowdown
        self._laid = {kind: self._lay(kind) for kind in "FB"}

    def _lay(self, kind: str) -> tuple[list[Span], float]:
        spans: list[Span] = []
        clock = 0.0
        for part in self._parts[kind]:
            laid, length = part.lay(self._hides, self._slowdown)
            spans += [Span(stream, clock + start, clock + end, name) for stream, start, end, name in laid]
            clock += length
        return spans, clock

    def seconds(self, kind: str) -> float:
        return self._laid[kind][1] if kind in "FB" else self._laid["B"][1] / 2

    def spans(self, kind: str) -> Iterator[Span]:
        """Of one action, from 0 on. I and W are halves of B: each shows every span of it at half its length."""
        half = 1.0 if kind in "FB" else 0.5
        tag = {"I": ", input gradient", "W": ", weight gradient"}.get(kind, "")
        for stream, start, end, name in self._laid["F" if kind == "F" else "B"][0]:
            yield Span(stream, start * half, end * half, name + tag + ",")


def _stages(subject: Subject, pieces: Pieces) -> list[_Stage]:
    """The head is on the last."""
    layout, stack = subject.layout, subject.stack
    count = layout.pp * layout.virtual_stages if layout.pp > 1 else 1
    stages = []
    for stage, layers in enumerate(cut_of(subject, count)):
        forward = [_layer(subject, pieces, index, backward=False) for index in layers]
        backward = [_layer(subject, pieces, index, backward=True) for index in reversed(layers)]
        if stage == 0 and any(pieces.embedding):
            forward.insert(0, _Part("forward of the embedding", pieces.embedding[0], 0.0, (), ()))
            backward.append(_Part("backward of the embedding", pieces.embedding[1], 0.0, (), ()))
        if stage == count - 1:
            forward.append(_Part("forward of the head and loss", pieces.head[0], 0.0, (), ()))
            backward.insert(0, _Part("backward of the head and loss", pieces.head[1], 0.0, (), ()))
        stages.append(_Stage(forward, backward, stack.hides_data, stack.slowdown))
    return stages


def _layer(subject: Subject, pieces: Pieces, index: int, *, backward: bool) -> _Part:
    """A third of the traffic within a layer belongs to the forward, the rest to the backward."""
    kind = index >= pieces.dense_layers
    layer, copies, data, stack = pieces.layers[kind], pieces.copies[kind], pieces.data, subject.stack
    hides = {
        "context": stack.hides_context,
        "expert": stack.hides_expert,
        "tensor": max(stack.hides_tensor, 0.6 if subject.layout.async_tp else 0.0),
    }
    between = []
    for stream, share in hides.items():
        exposed = getattr(layer, stream) * (2 if backward else 1) / 3
        if exposed:
            between.append((stream, exposed, exposed * share / (1 - share)))
    inside = sum(exposed for _, exposed, _ in between)
    if not backward:
        copied = copies.forward
        beside = [("all_gather", data.gather_forward, "gather of a layer's parameters")]
        name, compute, again = f"forward of layer {index}", layer.forward - inside, 0.0
    else:
        copied = copies.backward
        beside = [
            ("all_gather", data.gather_backward, "gather of a layer's parameters"),
            ("reduce_scatter", data.reduce, "reduction of a layer's gradients"),
        ]
        name, compute, again = f"backward of layer {index}", layer.backward - inside, layer.recompute
    return _Part(name, compute, again, tuple(between), tuple(item for item in beside if item[1]), copied)


def _once(subject: Subject) -> tuple[str, str]:
    """Stream and name of what data parallelism exchanges once a step."""
    layout = subject.layout
    if layout.zero == 1:
        return "reduce_scatter", "reduction of all gradients, gather of all parameters"
    if layout.zero == 2 and layout.dp_replicate == 1:
        return "all_gather", "gather of all parameters"
    return "reduce_scatter", "all-reduce of gradients over replicas"


def _run(subject: Subject, pieces: Pieces, stages: list[_Stage]) -> PipelineRun:
    layout = subject.layout
    if layout.pp > 1:
        programs = order(layout.schedule, layout.pp, subject.micro_batches, layout.virtual_stages)
        seconds = {(stage, kind): item.seconds(kind) for stage, item in enumerate(stages) for kind in "FBIW"}
        return simulate(programs, seconds, pieces.hop)
    actions, clock = [], 0.0
    for micro_batch in range(subject.micro_batches):
        for kind in "FB":
            end = clock + stages[0].seconds(kind)
            actions.append((Action(0, kind, micro_batch), clock, end))
            clock = end
    return PipelineRun([actions])


def _receives(run: PipelineRun, place: int, hop: float) -> Iterator[Span]:
    """What comes in from other pipeline ranks: it starts when its sender is done."""
    if not hop:
        return
    mine = {action.stage for action, _, _ in run.spans[place]}
    wanted = {
        (action.stage + (-1 if action.kind == "F" else 1), "F" if action.kind == "F" else "I", action.micro_batch)
        for action, _, _ in run.spans[place]
        if action.kind != "W"
    }
    for spans in run.spans:
        for action, _, end in spans:
            kind = "I" if action.kind == "B" else action.kind
            if action.stage not in mine and (action.stage, kind, action.micro_batch) in wanted:
                what = "activations" if kind == "F" else "gradients"
                yield Span("pipeline", end, end + hop, f"receive {what} of micro-batch {action.micro_batch}")
