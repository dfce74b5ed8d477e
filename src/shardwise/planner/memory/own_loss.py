"""The loss of a micro-batch and its backward, as the last stage has them."""

from __future__ import annotations

import math

from shardwise.planner.memory.own_held import Held
from shardwise.planner.memory.states import State
from shardwise.planner.memory.tape import Parts

CHUNKS = 8  # pieces into which the chunked loss cuts a micro-batch


class WithLoss(Held):
    """Moments are (name, bytes beside what lives there anyhow)."""

    def _loss(self, state: State, *, gathers: bool) -> list[tuple[str, Parts]]:
        """gathers: the forward has gathered something."""
        b, width, wide, n = self.block, self.block.width, self.wide, self.logits
        whole = b.whole if b.parallel else b.stream
        table = self.table.whole
        acts = b.stream * (2 if b.parallel else 1) + whole + b.statistics
        cast = width * table * b.casts
        buffer = 0.0
        if self.sharded and self.shares and gathers:  # the last gather's result is there until the forward's end
            if self.own_head and (not self.pipelined or self.micro_batches == 1):
                buffer = width * table
            elif not (self.pipelined and self._stays(state)):
                buffer = width * self.stages[state.place].runs[0].kind.unit.padded
        narrow = width if width < 4 else 0
        if not self.chunked:
            return [("loss", (0, cast + buffer, acts, (width + wide * (1 if not narrow else 2)) * n, 0))]
        n = math.ceil(self.rows / CHUNKS) * n / self.rows
        if not b.parallel:
            acts += whole  # the gradient of the input, beside the input; a gathered one is not kept
        beside = whole * b.parallel
        gathered = cast + buffer + wide * table
        return [
            ("loss", (0, gathered, acts, (2 * width + (2 if narrow else 1) * wide) * n, beside)),
            ("head's gradient", (0, gathered + width * table, acts, width * n, beside)),
        ]

    def _head_backward(self, state: State, ahead: float, *, stays: bool) -> list[tuple[str, Parts]]:
        b, width, wide, table = self.block, self.block.width, self.wide, self.table.whole
        whole = b.whole if b.parallel else b.stream
        n = self.logits
        _, kept_gathered, acts, _, _ = self._kept_by_head
        kept_gathered += ahead
        found: list[tuple[str, Parts]] = []
        if self.chunked:
            narrow = width * table * (width < 4)
            found.append(("head backward", (0, kept_gathered + wide * table + narrow, acts, 0, whole)))
        else:
            if b.parallel:
                found.append(("loss backward", (0, kept_gathered, acts, (2 * wide + width * (width < 4)) * n, 0)))
            else:
                found.append(("loss backward", (0, kept_gathered, acts, 3 * wide * n, 0)))
            found.append(("head backward", (0, kept_gathered + width * table, acts, width * n, whole)))
        # The gradient of the weight is there; its input's part, and the norm's.
        held = width * table
        stream = b.stream + b.statistics
        if self.sharded:
            if self.pipelined:
                new = wide * table * (not state.begun[state.place]) * self.own_head
                found.append(("head gradient", (new, ahead + held, stream, 0, b.stream)))
            elif not self.tied:
                reduced = wide * table - width * table * (not stays)
                new = wide * self.table.shard * (not self.shards_on_host)
                found.append(("head reduction", (new, ahead + held + reduced, stream, 0, b.stream)))
        elif width < 4:
            first = self._gradient(state) in ("first", "bucket") and not self.tied
            found.append(
                ("head gradient", (wide * table * first, ahead + held + wide * table * (not first), stream, 0, whole))
            )
        return found
