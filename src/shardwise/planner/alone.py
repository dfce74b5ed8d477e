"""A step of one rank of which there is nobody else, as `rehearse --device cuda` runs it: no exchange, no waiting."""

from __future__ import annotations

from dataclasses import replace

from shardwise.planner.pieces import PiecesModel
from shardwise.planner.schedules import stages_of
from shardwise.planner.stages import cut_of
from shardwise.planner.subject import Subject
from shardwise.spec.combinations import FOLDED


def alone_seconds(subject: Subject, stage_rank: int) -> float:
    """Seconds of a step on pipeline rank `stage_rank`, its exchanges and its waiting for others left out."""
    layout, model = subject.layout, subject.model
    gpu = subject.cluster.gpu.model_copy(update={"intra": None, "inter": None})
    subject = replace(subject, cluster=subject.cluster.model_copy(update={"gpu": gpu}))
    pieces = PiecesModel(subject).pieces(subject)
    count, mine = 1, [0]
    if layout.pp > 1:
        count = 2 * layout.pp if layout.schedule in FOLDED else layout.pp * layout.virtual_stages
        mine = list(stages_of(layout.schedule, layout.pp, layout.virtual_stages, stage_rank))
    cut, dense = cut_of(subject, count), model.experts.dense_layers if model.experts else 0
    each = sum(pieces.embedding) * (0 in mine) + sum(pieces.head) * (count - 1 in mine)
    for stage in mine:
        for index in cut[stage]:
            layer, copies = pieces.layers[index >= dense], pieces.copies[index >= dense]
            each += layer.forward + layer.backward + copies.forward + copies.backward
    once = pieces.data.once + pieces.copied_once + pieces.optimizer + pieces.host
    return subject.micro_batches * each + once + subject.stack.step_overhead_seconds
