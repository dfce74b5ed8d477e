"""The moments of a step of our own trainer, one after the other, at which its peak can be.

Each is what lives from action to action of the schedule (`states.py`), and what comes and goes within one: the loss, a
block's backward (`block_tape.py`), the embedding's, the reductions, the update. Weights and their gradients in flight
count as gathered, what a forward leaves for the backward as activations; what is made again for it is transient.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner.memory.own_held import Run, Stage
from shardwise.planner.memory.own_loss import WithLoss
from shardwise.planner.memory.saved_tape import Gradient
from shardwise.planner.memory.states import State
from shardwise.planner.memory.tape import GRADIENTS, Parts, plus
from shardwise.planner.memory.units import VISITORS, Event
from shardwise.planner.memory.weights import Weights

BUCKET = 64 * 2**20  # elements that are reduced, or gathered after an update, together


class Own(WithLoss):
    """All moments."""

    def moments(self, *, every: bool = True) -> Iterator[Event]:
        """Every one; or of those within a block's backward only the fullest."""
        for state in self.states:
            stage = self.stages[state.place]
            if state.kind == "F" and not stage.last:
                continue  # what it leaves is there in its backward, too
            base = self._base(state)
            if state.kind == "F":
                if self.keeps_gathered and not self.pipelined and self.micro_batches > 1:
                    yield from self._events(plus(base, (-base[GRADIENTS], 0, 0, 0, 0)), self._loss(state, gathers=True))
                    yield from self._events(base, self._loss(state, gathers=False))
                else:
                    yield from self._events(base, self._loss(state, gathers=True))
            elif state.kind == "B" or (state.kind == "W" and stage.first):
                if self.keeps_gathered and not self.pipelined and self.micro_batches > 1:  # all but the last
                    yield from self._backward(state, base, stays=True, every=every)
                yield from self._backward(state, base, stays=False, every=every)
            elif state.kind in "IW":
                yield from self._halves(state, base, every=every)
        yield from self._after()

    def _events(self, base: Parts, moments: list[tuple[str, Parts]]) -> Iterator[Event]:
        for name, parts in moments:
            yield (name, *plus(base, parts))

    # The backward.

    def _backward(self, state: State, base: Parts, *, stays: bool, every: bool) -> Iterator[Event]:
        """Of one micro-batch through a stage. The base has all that its forward has left. stays: with zero 2 weights
        are not given up after it."""
        stage, width, wide = self.stages[state.place], self.block.width, self.wide
        gradient, table = self._gradient(state), self.table.whole
        one = width * stage.runs[0].kind.unit.padded
        gathers = self.sharded and not self._stays(state)
        ahead = one * self.prefetch * self.shares if gathers else 0.0
        growing = self._growing(state, stays=stays)
        gradients = (
            -wide * self.all.shard * (growing and self.micro_batches > 1 and not self.pipelined and self.sharded)
        )
        given_up = self.sharded and not self.pipelined and not stays
        tied = 0.0
        if stage.last:
            start = plus(base, (gradients, 0, 0, 0, 0))
            yield from self._events(start, self._head_backward(state, ahead, stays=stays))
            if self.tied or (self.sharded and not self.own_head):
                tied = width * table if self.sharded else wide * table
            elif self.sharded:
                gradients += wide * (table if self.pipelined else self.table.shard) * growing
                tied -= width * table * given_up
            elif gradient == "first":
                gradients += wide * table
            elif gradient == "moved":
                gradients -= wide * table
        here = plus(base, (gradients, tied, 0, 0, 0))
        # Blocks from the last to the first: those before it have not given up anything, those behind it all.
        previous = wide * table * (stage.last and not self.tied)  # the input of the reduction before this one
        index, behind = 0, Weights()
        for run in stage.runs:
            kept, one_segment = self._backward_of(run, gradient).kept, run.kind.weights * run.segment
            for position in _ends(run.count):
                at, done = index + position, behind + one_segment * position
                left = plus(here, kept, -position)
                before = wide * run.kind.unit.padded if position else previous
                yield from self._block(state, left, run, at, done, stage, before, gradient, stays=stays, every=every)
            here = plus(here, kept, -run.count)
            index, behind = index + run.count, behind + run.weights
            previous = wide * run.kind.unit.padded
        if stage.first:
            yield from self._embedding(state, here, stage, gradient, stays=stays)

    def _block(
        self,
        state: State,
        here: Parts,
        run: Run,
        at: int,
        behind: Weights,
        stage: Stage,
        previous: float,
        gradient: Gradient,
        *,
        stays: bool,
        every: bool,
    ) -> Iterator[Event]:
        """The backward of the block that is `at`-th from the stage's end. here: with what it and those before it
        have kept. behind: weights of those that are done."""
        b, width, wide = run.kind.block, self.block.width, self.wide
        whole, shard = run.kind.weights.whole * run.segment, run.kind.weights.shard * run.segment
        one, last = width * run.kind.weights.padded * run.segment, at == stage.blocks - 1
        name = "block backward"
        there = self._stays(state)
        ahead = width * run.kind.unit.padded * self.prefetch * self.shares * (not there)
        if last and (self.pipelined or not there):
            ahead = 0.0 if self.pipelined else width * self.table.whole * (self.embeds and not self.tied) * self.shares
        block, reducing, gathering = b, previous, ahead
        if self.sharded:
            before = 0.0 if self.pipelined else previous
            block, reducing, gathering = b.within(before, ahead, there=there, stays=stays)
        profile = self._backward_of(run, gradient, block)
        start = plus(plus(here, profile.kept, -1.0), (0, 0, 0, 0, self.operands))
        if not self.sharded:
            done = {"first": wide, "moved": -wide}.get(gradient, 0) * behind.whole
            start = plus(start, (done, 0, 0, 0, 0))
            for _, parts in profile.moments if every else (profile.top,):
                yield (name, *plus(start, parts))
            return
        unit = width * run.kind.unit.padded
        if self.pipelined:
            done = wide * behind.whole * (not state.begun[state.place])
            own = 0.0 if there else width * behind.padded + unit
            moment = plus(start, (done, own + gathering, 0, 0, 0))
            for _, parts in profile.moments if every else (profile.top,):
                yield (name, *plus(moment, parts))
            more = 0.0 if state.begun[state.place] else wide * whole
            gathered = ahead + one + (0.0 if there else width * behind.padded + one)
            yield ("block's gradients", *plus(start, (done + more, gathered, 0, 0, b.stream)))
            return
        growing = self._growing(state, stays=stays)
        done = wide * behind.shard * growing
        gone = width * behind.padded * (self.keeps_gathered and not stays)
        own = unit * (not there)
        moment = plus(start, (done, own + gathering + reducing - gone, 0, 0, 0))
        for _, parts in profile.moments if every else (profile.top,):
            yield (name, *plus(moment, parts))
        reducing = ahead + wide * run.kind.unit.padded + unit - gone - unit * (self.keeps_gathered and not stays)
        new = wide * shard * (not self.shards_on_host)
        yield ("block reduction", *plus(start, (done + new, reducing, 0, 0, b.stream)))

    def _embedding(
        self, state: State, here: Parts, stage: Stage, gradient: Gradient, *, stays: bool
    ) -> Iterator[Event]:
        b, width, wide, table = self.block, self.block.width, self.wide, self.table.whole
        if not self.sharded:
            per = {"first": wide, "moved": -wide}.get(gradient, 0) * stage.weights.whole
            scale = wide / width
            if gradient == "first":
                per += wide * self.positions.whole
            if b.parallel:
                yield ("embedding's rows", *plus(here, (per, 0, 0, 0, (b.stream + 2 * b.whole) * scale)))
            rows = (b.whole if b.parallel else b.stream) * scale
            made = wide * table
            kept = made * (gradient in ("first", "bucket"))
            other = made - kept + made * (stage.last and self.tied)  # its own, before it is added to the head's
            yield ("embedding backward", *plus(here, (per + kept, other, 0, 0, rows)))
            return
        if self.pipelined:
            done = wide * stage.weights.whole * (not state.begun[state.place])
            own = 0.0 if self._stays(state) else width * (stage.weights.padded + table * (not self.tied))
            more = 0.0 if state.begun[state.place] else wide * table
            yield ("embedding backward", *plus(here, (done, own + width * table, 0, 0, b.stream)))
            yield ("embedding's gradient", *plus(here, (done + more, own + width * table, 0, 0, 0)))
            return
        done = wide * stage.weights.shard * self._growing(state, stays=stays)
        reducing = wide * stage.runs[-1].kind.unit.padded
        own = 0.0 if self.keeps_gathered or self.tied else width * table
        done_with = width * stage.weights.padded * (self.keeps_gathered and not stays)
        here = plus(here, (0, -done_with, 0, 0, 0))
        made = width * (table * (2 if self.tied and stage.last else 1) + self.positions.whole)
        rows = b.stream + (2 * b.whole if b.parallel else 0)
        yield ("embedding backward", *plus(here, (done, own + reducing + made, 0, 0, rows)))
        # Given up before: the table, or with the gradient that the head has left, the root's.
        gone = 2 * width * table if self.tied else width * table * (self.keeps_gathered and not stays)
        new = wide * self.table.shard * (not self.shards_on_host)
        yield ("embedding reduction", *plus(here, (done + new, (width + wide) * table - gone, 0, 0, 0)))

    def _halves(self, state: State, base: Parts, *, every: bool) -> Iterator[Event]:
        """I on a stage that is not the first; W of one."""
        stage, width, wide = self.stages[state.place], self.block.width, self.wide
        if state.kind == "I":
            if stage.first:
                return
            if stage.last:
                yield from self._events(base, self._head_backward(state, 0.0, stays=True))
                base = plus(base, self._kept_by_head)
                base = plus(base, (0, 0, 0, width * self.logits * (not self.chunked), 0))
            for run in stage.runs:
                profile = self._backward_of(run, "later")
                grown = plus(profile.after, profile.kept, -1)
                start = plus(plus(base, grown, run.count - 1), profile.kept, -1)
                yield from self._events(
                    start, [("input's backward", parts) for _, parts in (profile.moments if every else (profile.top,))]
                )
            return
        more = self._weights[state.place].whole * wide * (not state.begun[state.place]) * (not self.sharded)
        waiting = self._weights[state.place].whole * width * self.sharded
        largest = max(run.kind.block.largest for run in stage.runs)
        temporary = (width + wide) * largest * (width < 4)
        yield ("weights' backward", *plus(base, (0, temporary * (not self.sharded), 0, 0, 0)))
        yield ("weights' backward", *plus(base, (more, waiting, 0, 0, 0)))

    # After the backward.

    def _after(self) -> Iterator[Event]:
        wide, width, ids = self.wide, self.block.width, self.ids
        held = self.all
        full = wide * held.whole
        if self.sharded:
            full = 0.0 if self.shards_on_host else wide * held.shard
            if self.pipelined:
                gathered = width * held.whole
                largest = max(
                    self.table.whole * (self.embeds or self.heads),
                    *(run.kind.weights.padded for stage in self.stages for run in stage.runs),
                )
                yield ("reduction", wide * held.whole, gathered + wide * largest, 0.0, 0.0, ids)
        elif self.summed:
            bucket = max(self._bucket(part) for part in self._alike[: 1 + self.experts_summed])
            yield ("reduction", full, wide * bucket, 0.0, 0.0, ids)
        visiting = 0.0
        if self.offloads_optimizer:
            most = max(VISITORS, self.table.shard)
            visiting = 2 * wide * max(min(part.shard, most) for part in self._alike)
        if self.zero1:
            buckets = [self._bucket(part) * (1 + part.shard / part.whole) for part in self._alike if part.whole]
            visiting = max(visiting, wide * max(buckets), wide * self.copied)
        yield ("update", full, 0.0, 0.0, 0.0, visiting + ids)

    @property
    def _alike(self) -> tuple[Weights, Weights]:
        """Weights that the same ranks hold: those beside the experts that are spread, and these."""
        return self.all + self.experts * -1, self.experts

    def _bucket(self, part: Weights) -> float:
        return min(part.whole, max(BUCKET, self.table.whole))


def _ends(count: int) -> list[int]:
    """Places of which one is the fullest, of blocks that are alike."""
    return sorted({0, min(1, count - 1), max(0, count - 2), count - 1})
