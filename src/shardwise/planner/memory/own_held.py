"""One pipeline rank of our own trainer, and what lives there from one action of its schedule to the next."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardwise.planner.memory.block_tape import Backward, Block, backward_of
from shardwise.planner.memory.saved_tape import Gradient
from shardwise.planner.memory.states import State
from shardwise.planner.memory.tape import NOTHING, Parts, plus
from shardwise.planner.memory.weights import Weights


@dataclass(frozen=True)
class Kind:
    """Blocks that are alike. weights: of one; unit: of these what FSDP2 gathers as one."""

    block: Block
    weights: Weights
    unit: Weights


@dataclass(frozen=True)
class Run:
    """Of a stage: how many blocks of a kind keep all, or how many segments of them are made again."""

    kind: Kind
    again: bool
    count: int
    segment: int  # blocks in each
    layers: int

    @functools.cached_property
    def weights(self) -> Weights:
        return self.kind.weights * self.layers


@dataclass(frozen=True)
class Stage:
    """Of a pipeline. runs: its blocks, from the last; where some of a kind are made again and some not, as if one came
    after the other."""

    runs: tuple[Run, ...]
    first: bool  # has the embedding
    last: bool  # has the head and the loss

    @functools.cached_property
    def blocks(self) -> int:
        return sum(run.count for run in self.runs)

    @functools.cached_property
    def weights(self) -> Weights:
        """Of its blocks."""
        return sum((run.weights for run in self.runs), Weights())


@dataclass(frozen=True)
class Held:
    """One pipeline rank; bytes, but elements where it says Weights."""

    kinds: tuple[Kind, ...]
    policy: str  # of blocks that are recomputed: selective or full
    stages: tuple[Stage, ...]
    states: list[State]
    table: Weights  # the embedding, or the head
    positions: Weights
    tied: bool  # head and embedding are one table, and both are here
    own_head: bool  # the head has a table of its own, which is a unit with the last norm
    embeds: bool
    heads: bool
    sharded: bool  # FSDP2: zero 2 or 3
    keeps_gathered: bool  # zero 2
    shares: bool  # several ranks share the weights, and gather them
    prefetch: int
    replicated: bool  # DDP
    summed: bool  # gradients are summed over replicas after the backward, without a wrapper
    zero1: bool
    experts: Weights  # all routed experts, with expert parallelism
    experts_summed: bool  # `summed` is true of them, too
    copied: float  # elements of parts of weights that its optimizer updates in copies, as they do not lie in one piece
    shards_on_host: bool
    offloads_optimizer: bool
    offloads_activations: bool
    pipelined: bool
    halves: bool  # backward of inputs and of weights apart
    micro_batches: int
    rows: float  # tokens of a micro-batch on this rank
    tables: float  # rotary tables of a micro-batch
    ids: float  # of a step, with labels
    logits: float  # elements
    chunked: bool
    operands: float  # low-precision copies beside a block's backward

    @property
    def block(self) -> Block:
        """One of which the sizes of streams and statistics are those of all."""
        return self.kinds[-1].block

    @property
    def wide(self) -> int:
        return max(4, self.block.width)

    @functools.cached_property
    def all(self) -> Weights:
        tables = self.embeds + (self.heads and not self.tied)
        blocks = sum((stage.weights for stage in self.stages), Weights())
        return blocks + self.table * tables + self.positions * self.embeds

    def held(self) -> tuple[float, float]:
        """Parameters and optimizer state."""
        weights = self.all
        parameters = self.wide * (weights.shard if self.sharded or not self.zero1 else weights.whole)
        optimizer = 2.0 * self.wide * weights.shard * (not self.offloads_optimizer)
        return (0.0, 0.0) if self.shards_on_host else (parameters + self.wide * self.copied, optimizer)

    def _backward_of(self, run: Run, gradient: Gradient, block: Block | None = None) -> Backward:
        policy = self.policy if run.again else "none"
        return backward_of(block or run.kind.block, policy, gradient, self.offloads_activations, run.segment)

    @functools.cached_property
    def _kept(self) -> list[Parts]:
        return [self._kept_by(stage) for stage in self.stages]

    @functools.cached_property
    def _split(self) -> list[Parts]:
        return [self._split_by(stage) for stage in self.stages]

    def _kept_by(self, stage: Stage) -> Parts:
        """By one micro-batch in one stage, without the head's."""
        kept: Parts = (0.0, 0.0, self.tables, 0.0, 0.0)
        for run in stage.runs:
            kept = plus(kept, self._backward_of(run, "sharded").kept, run.count)
        # What was sent, and what was received: as a block's input it may be on the host, but it is the pipeline's, too.
        streams = (not stage.last) + (self.offloads_activations and not stage.first)
        return plus(kept, (0, 0, self.block.stream * streams, 0, 0))

    @functools.cached_property
    def _kept_by_head(self) -> Parts:
        """Between the loss and its backward."""
        b, width = self.block, self.block.width
        whole = b.whole if b.parallel else b.stream
        acts = b.stream + b.statistics + whole
        if self.chunked:
            return (0, self.wide * self.table.whole, acts, 0, 0)
        cast = width * self.table.whole * b.casts
        return (0, cast, acts, self.wide * self.logits, 0)

    def _base(self, state: State) -> Parts:
        """Without what the action's own micro-batch has of the head's, and its own gathered weights."""
        base = (0.0, 0.0, 0.0, 0.0, self.ids)
        current = self.stages[state.place]
        whole, bytes_ = 0.0, self.wide
        for place, stage in enumerate(self.stages):
            held, split = state.held[place], state.split[place]
            base = plus(base, self._kept[place], held)
            others = held - (place == state.place and state.kind in "FBI")
            if stage.last and self.pipelined and not self.halves:
                # The losses hold on to their graphs, and so to what was received, until the step's end.
                base = plus(base, (0, 0, self.block.stream * (self.micro_batches - held), 0, 0))
            if stage.last and others:
                base = plus(base, self._kept_by_head, others)
            if split:
                base = plus(base, self._split[place], split)
            if state.begun[place]:
                whole += self._weights[place].whole
                apart = self.sharded and self.halves and not stage.first
                if apart and not (place == state.place and state.kind == "W"):
                    # FSDP2 does not see a backward of weights alone: what it made waits for the next one of inputs.
                    base = plus(base, (0, self.block.width * self._weights[place].whole, 0, 0, 0))
        gradients = bytes_ * whole
        if not self.pipelined and self.sharded:
            gradients = bytes_ * self.all.shard * (self.micro_batches > 1) * (not self.shards_on_host)
        if self.replicated:
            gradients += bytes_ * self.all.whole
        return plus(base, (gradients, self._gathered(state, current), 0, 0, 0))

    @functools.cached_property
    def _weights(self) -> list[Weights]:
        """Of each stage, with its tables."""
        return [
            stage.weights
            + self.table * (stage.first + (stage.last and not (self.tied and stage.first)))
            + self.positions * stage.first
            for stage in self.stages
        ]

    def _gathered(self, state: State, current: Stage) -> float:
        """FSDP2's, without those of the blocks of the action's own stage that it gathers itself."""
        if not self.sharded:
            return 0.0
        width, gathered = self.block.width, 0.0
        for place, stage in enumerate(self.stages):
            left = self.keeps_gathered or (self.pipelined and state.gathered[place])
            if stage.first or (stage.last and self.tied):
                gathered += width * self.positions.whole * stage.first
                if self.tied or left:
                    gathered += width * self.table.whole
            if stage.last and not self.tied:
                gathered += width * self.table.whole
            if left:
                gathered += width * stage.weights.padded
        return gathered

    def _split_by(self, stage: Stage) -> Parts:
        """What the backward of inputs alone has left, beside what the forward had."""
        if stage.first:
            return (0, 0, 0, 0, self.block.stream)
        left = (0.0, 0.0, 0.0, 0.0, 0.0)
        for run in stage.runs:
            profile = self._backward_of(run, "later")
            left = plus(left, plus(profile.after, profile.kept, -1), run.count)
        left = plus(plus(NOTHING, self._kept_by(stage)), left)
        if stage.last:
            _, gathered, kept, _, _ = self._kept_by_head
            # The loss's own graph is gone; of its logits the gradient stays, for that of the head's weight.
            left = plus(left, (0, gathered, kept, self.block.width * self.logits * (not self.chunked), 0))
        return left

    def _growing(self, state: State, *, stays: bool) -> bool:
        """Whether gradients come to be in this backward, and are kept on the device."""
        if not self.sharded or self.pipelined:
            return not state.begun[state.place]
        return (self.micro_batches == 1 or (stays and self.micro_batches == 2)) and not self.shards_on_host

    def _stays(self, state: State) -> bool:
        """Whether the stage's blocks are gathered already when its backward begins."""
        return self.keeps_gathered or (self.pipelined and state.gathered[state.place])

    def _gradient(self, state: State) -> Gradient:
        if self.sharded:
            return "sharded"
        if self.replicated:
            return "bucket" if self.micro_batches == 1 else "moved" if self.micro_batches == 2 else "more"
        return "more" if state.begun[state.place] else "first"
