"""Recompute policies: what of a block's forward runs again in the backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recompute:
    """Shares of a block's forward work that run twice."""

    gemm: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0


NONE, FULL = Recompute(), Recompute(1.0, 1.0, 1.0)


def recompute_of(policy: str) -> Recompute:
    """`layout.recompute`: none; selective keeps matmuls and attention, and repeats what lies between them; full repeats
    the block; every:K repeats each K-th block; sqrt repeats all but the segments' ends (arXiv 1604.06174)."""
    if policy == "selective":
        return Recompute(traffic=1.0)
    if policy.startswith("every:"):
        share = 1 / int(policy.removeprefix("every:"))
        return Recompute(share, share, share)
    return NONE if policy == "none" else FULL
