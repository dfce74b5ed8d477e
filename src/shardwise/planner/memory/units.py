"""The moments of a step at which our own trainer can reach its peak; torchtitan and FSDP1 are built alike.

Gathered weights and their gradients are as wide as the compute type; what is sharded and what is reduced is fp32. FSDP2
has one unit for every block, one for an untied embedding, one for final norm and untied head; a tied table belongs to
the root, which stays gathered (`parallel/data.py`). Traced with tests/memory_trace.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.planner.memory.weights import Weights

VISITORS = 32 * 2**20  # elements whose optimizer state visits the device together
CHUNKS = 8  # pieces into which the chunked loss cuts a micro-batch


@dataclass(frozen=True)
class Situation:
    """One pipeline rank; bytes, but elements where it says Weights."""

    block: Weights  # the largest
    blocks: Weights  # all
    casting: float  # elements of the blocks whose cast copies stay for the backward, where there is no FSDP2
    cast_again: float  # of those that the backward makes again at once
    table: Weights  # the embedding, or the head
    positions: Weights
    embeds: bool  # the rank has the embedding
    heads: bool  # the rank has the head and the loss
    tied: bool  # both are one table, and both are here
    width: int  # of the compute type
    casts: bool  # which is narrower than the weights
    keeps_gathered: bool  # zero 2
    shares: bool  # several ranks share the weights, and gather them
    prefetch: int  # units that are gathered ahead of the one that computes
    replicated: bool  # DDP
    shards_on_host: bool  # with their gradients
    offloads_optimizer: bool
    micro_batches: int  # a step
    whole_gradients: bool  # not sharded from one micro-batch to the next: DDP, ZeRO-1, pipelines
    pipelined: bool  # other micro-batches' activations are there during a backward
    stream: float  # one tensor of the residual stream
    head_input: float  # the same gathered over tensor-parallel ranks; 0 where it is whole already
    kept: float  # saved activations, at their most
    kept_at_head: float  # where the last stage runs
    kept_block: float  # one block's share of them
    recomputed: float  # what a block's backward makes again
    working: float  # temporaries beside it
    logits: float  # elements
    loss: float  # bytes of each at the loss's peak
    chunked: bool

    @property
    def own_head(self) -> bool:
        return self.heads and not self.tied

    @property
    def visiting(self) -> float:
        """Optimizer state that is on the device at once: of one bucket of `training/offloaded_optimizer.py`."""
        tables = self.embeds + self.own_head
        shards = self.blocks.shard + tables * self.table.shard + self.embeds * self.positions.shard
        return self.offloads_optimizer * 2 * max(4, self.width) * min(shards, max(VISITORS, self.table.shard))

    @property
    def scaled_gradient(self) -> float:
        """The chunked loss's gradient of the head, in fp32, the same scaled, and that in the compute type."""
        return (8 + self.width * self.casts) * self.table.whole

    @property
    def all_shards(self) -> float:
        """Elements of all gradients that are held from one micro-batch to the next."""
        tables = self.embeds + self.own_head
        if self.whole_gradients:
            return self.blocks.whole + tables * self.table.whole + self.embeds * self.positions.whole
        return self.blocks.shard + tables * self.table.shard + self.embeds * self.positions.shard


Event = tuple[str, float, float, float, float, float]  # name, gradients, gathered, activations, logits, transient


def sharded_events(at: Situation) -> Iterator[Event]:
    """FSDP2. From the second micro-batch on gradients are there from the start; with zero 2 what is gathered stays so
    until the last one."""
    full = 4 * at.all_shards * (not at.shards_on_host or at.whole_gradients)
    if at.micro_batches > 1 and at.keeps_gathered:
        yield from _pass(at, full if at.micro_batches > 2 else 0.0, stays=True)
    yield from _pass(at, full if at.micro_batches > 1 else 0.0, stays=False)
    yield "update", full, 0.0, 0.0, 0.0, at.visiting


def _pass(at: Situation, held: float, *, stays: bool) -> Iterator[Event]:
    """Forward and backward of one micro-batch. held: bytes of gradients at its start; stays: zero 2 keeps weights."""
    width, table = at.width, at.table.whole
    one, reduced, shard = width * at.block.whole, 4 * at.block.whole, 4 * at.block.shard
    own_embedding = at.embeds and not at.tied
    root = width * (at.positions.whole + table * at.tied) * at.embeds
    zero2 = (width * at.blocks.whole + width * table * own_embedding) if at.keeps_gathered else 0.0
    head, head_gradient = width * table * at.own_head, width * table * at.heads
    if at.heads:
        logits = at.loss * at.logits
        # The backward begins with the gather of the last blocks.
        ahead = one * at.prefetch * at.shares * (not at.keeps_gathered)
        beside = ahead
        if at.chunked:
            logits, beside = logits / CHUNKS, 4 * table
        kept, gathered = at.kept_at_head + 2 * at.stream + at.head_input, root + head + zero2
        yield "loss", held, gathered + beside, kept, logits, (at.head_input or at.stream) * at.chunked
        logits = 0.0 if at.chunked else width * at.logits
        beside = at.scaled_gradient if at.chunked else head_gradient
        yield "head backward", held, gathered + ahead + beside, kept, logits, at.head_input or at.stream
        if at.own_head:
            gathered = root + (zero2 or one) + head * stays + (width + 4) * table
            yield "head reduction", held + 4 * at.table.shard, gathered, kept - at.stream, 0.0, at.stream

    tied_gradient = head_gradient * at.tied
    # The block's own weights and, prefetched, those of the one before it.
    around = root + head * stays + tied_gradient + (zero2 or 2 * one)
    start = held or 4 * at.table.shard * at.own_head
    alive = at.kept_block + at.recomputed
    yield "last block backward", start, around + 4 * table * at.own_head, at.kept + at.recomputed, 0.0, at.working
    # At its start a block has all its activations, at its end all its gradients.
    working = max(at.working, one - alive)
    left = max(0.0, at.kept - at.kept_block)
    yield "block backward", start + shard, around + reduced, left + at.recomputed, 0.0, working
    end = held or start + 4 * at.blocks.shard
    gathered = root + head * stays + tied_gradient + reduced + (zero2 if stays else one + width * table * own_embedding)
    yield "first block backward", end, gathered, left * at.pipelined + alive, 0.0, working
    if at.embeds:
        embedding = width * table * (not stays or at.tied)
        gathered = (zero2 + head) * stays
        gradients = width * table * (3 if at.tied else 1)
        yield "embedding backward", end, gathered + reduced + embedding + gradients, 0.0, 0.0, 0.0
        yield "embedding reduction", end + 4 * at.table.shard, gathered + (width + 4) * table, 0.0, 0.0, 0.0


def replicated_events(at: Situation) -> Iterator[Event]:
    """DDP, and one rank alone. Each product casts its weight and keeps the copy for the backward, unless it is
    recomputed; DDP's buckets hold all gradients for good."""
    table = at.table.whole
    casts = at.width * (at.casting + table * at.heads) * at.casts
    full = 4 * at.all_shards
    # DDP's buckets are there for good; while it does not reduce, gradients are beside them.
    held = full * ((at.micro_batches > 1) + at.replicated)
    cast_gradient = at.width * table * at.casts
    if at.heads:
        logits = at.loss * at.logits
        beside = 0.0
        if at.chunked:
            logits, beside = logits / CHUNKS, 4 * table
        yield "loss", held, casts + beside, at.kept_at_head + 2 * at.stream, logits, at.stream * at.chunked
        logits = 0.0 if at.chunked else at.width * at.logits
        gathered = casts + (at.scaled_gradient - cast_gradient if at.chunked else cast_gradient + 4 * table)
        yield "head backward", held, gathered, at.kept_at_head + 2 * at.stream, logits, at.stream
    tied_gradient = 4 * table * (at.heads and at.tied)
    start = held or 4 * table * at.own_head
    again = at.width * at.cast_again * at.casts
    yield "last block backward", start, casts + again + tied_gradient, at.kept + at.recomputed, 0.0, at.working
    end = held or 4 * at.blocks.whole + start
    left = max(0.0, at.kept - at.kept_block)
    alive = at.kept_block + at.recomputed
    one = at.width * at.block.whole * at.casts
    yield "first block backward", end, tied_gradient + one, left * at.pipelined + alive, 0.0, at.working
    if at.embeds:
        yield "embedding backward", end, 4 * table * (3 if at.tied else 1), 0.0, 0.0, 0.0
    yield "update", full, 0.0, 0.0, 0.0, at.visiting
