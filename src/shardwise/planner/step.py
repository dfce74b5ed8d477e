"""The time of one optimizer step, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.pieces import PiecesModel
from shardwise.planner.pipeline import total_seconds
from shardwise.planner.schedules import stages_of, steady_micro_batches
from shardwise.planner.stacks import Stack
from shardwise.planner.stages import cut_of, cuts_by_cost
from shardwise.planner.subject import Subject


@dataclass(frozen=True)
class StepTime:
    """`seconds` of one step; `parts` are what the busiest rank spends, by kind, exposed time only."""

    seconds: float
    parts: dict[str, float]
    bubble_fraction: float


def predict_step(subject: Subject) -> StepTime:
    """The step of one Subject; `StepModel` predicts many that share all but the layout."""
    return StepModel(subject).predict(subject)


class StepModel(PiecesModel):
    """Predicts the steps of subjects that differ in layout, micro-batches and recompute only, remembering their parts.

    Data parallelism hides behind the layers of a micro-batch as far as they last. Stages run through the pipeline's own
    schedule.
    """

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
            "host": pieces.host,
        }
        after = once + pieces.copied_once + pieces.optimizer + pieces.host
        return StepTime(total + after + stack.step_overhead_seconds, parts, bubble)


def beside(compute: float, communication: float, stack: Stack) -> float:
    """Compute with communication that may hide behind it."""
    hidden = communication * stack.hides_data
    exposed = communication - hidden
    return max(compute + stack.slowdown * min(hidden, compute), hidden) + exposed


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
        return total_seconds(layout.schedule, layout.pp, count, layout.virtual_stages, seconds, hop)

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
