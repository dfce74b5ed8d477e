"""Recompute policies: what of the forward runs again in the backward. The planner prices them, and the trainer does
what they say (`parallel/recompute.py`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Recompute:
    """`gemm`, `attention`, `traffic`: shares of all blocks' forward work that run twice.

    `kind`: what happens to the blocks that are repeated. selective keeps the results of products, attention and
    collectives, and repeats what lies between them; full keeps a block's input, sqrt that of a segment of ⌈√n⌉ blocks
    (arXiv 1604.06174). `every`: of so many blocks the first one is repeated.
    """

    gemm: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    kind: Literal["none", "selective", "full", "sqrt"] = "none"
    every: int = 1

    def segments(self, blocks: int) -> list[range]:
        """Which of a stage's blocks are repeated, and which of these as one."""
        if self.kind == "none":
            return []
        length = math.ceil(math.sqrt(blocks)) if self.kind == "sqrt" else 1
        step = max(length, self.every)
        return [range(first, min(first + length, blocks)) for first in range(0, blocks, step)]


NONE = Recompute()


@functools.cache
def recompute_of(policy: str) -> Recompute:
    """`layout.recompute`: none, selective, full, every:K or sqrt."""
    if policy == "none":
        return NONE
    if policy == "selective":
        return Recompute(traffic=1.0, kind="selective")
    if policy == "sqrt":
        return Recompute(1.0, 1.0, 1.0, kind="sqrt")
    every = int(policy.removeprefix("every:")) if policy.startswith("every:") else 1
    return Recompute(1 / every, 1 / every, 1 / every, kind="full", every=every)
