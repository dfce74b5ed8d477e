"""A step of one rank of which there is nobody else, as `rehearse --device cuda` runs it: no exchange, no waiting."""

from __future__ import annotations

from dataclasses import replace

from shardwise.planner.memory.stages import chunks_of
from shardwise.planner.pieces import PiecesModel
from shardwise.planner.subject import Subject


def alone_seconds(subject: Subject, stage_rank: int) -> float:
    """Seconds of a step on pipeline rank `stage_rank`, its exchanges and its waiting for others left out."""
    layout = subject.layout
    gpu = subject.cluster.gpu.model_copy(update={"intra": None, "inter": None})
    subject = replace(subject, cluster=subject.cluster.model_copy(update={"gpu": gpu}))
    pieces, mine = PiecesModel(subject).pieces(subject), chunks_of(subject, layout, stage_rank)
    last = len(mine) * layout.pp - 1
    each = sum(pieces.embedding) * (0 in mine) + sum(pieces.head) * (last in mine)
    for chunk in mine.values():
        for count, layer, copies in zip((chunk.dense, chunk.moe), pieces.layers, pieces.copies, strict=True):
            each += count * (layer.forward + layer.backward + copies.forward + copies.backward)
    once = pieces.data.once + pieces.copied_once + pieces.optimizer + pieces.host
    return subject.micro_batches * each + once + subject.stack.step_overhead_seconds
