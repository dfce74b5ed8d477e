"""Megatron and DeepSpeed: whole weights and gradients on every data rank, optimizer state shared out or not."""

from __future__ import annotations

from shardwise.planner.memory.families import Family
from shardwise.planner.memory.units import Event, Situation


def whole_states(at: Situation, family: Family, gradient_bytes: float) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state, all held for good."""
    weights = at.blocks + at.table * (at.embeds + at.own_head) + at.positions * at.embeds
    state = family.state_bytes + (4 if family.copies_gradients and gradient_bytes < 4 else 0)
    return family.weight_bytes * weights.whole, gradient_bytes * weights.whole, state * weights.shard


def whole_events(at: Situation, gradients: float) -> list[Event]:
    """The moments that can be the peak. Nothing is gathered or made for the update beyond what is held for good."""
    events: list[Event] = [("block backward", gradients, 0.0, at.kept + at.recomputed, 0.0, at.working)]
    if at.heads:
        events.append(("loss", gradients, 0.0, at.kept_at_head + 2 * at.stream, at.loss * at.logits, 0.0))
    return events
