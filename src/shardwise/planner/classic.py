"""The textbook formulas, by name. Each is exact about what it counts and silent about the rest (logits, gathered
weights, buffers, fragmentation), which is why `planner/memory` does not use them. Worked examples: docs/memory.md."""

from __future__ import annotations

from typing import Literal

ZeroStage = Literal[0, 1, 2, 3]


def zero_bytes_per_parameter(ranks: int, stage: ZeroStage) -> float:
    """Model states of mixed-precision Adam: 2 B weight, 2 B gradient, 12 B fp32 weight and moments.

    Stage 0: 16; 1: 4 + 12/N; 2: 2 + 14/N; 3: 16/N. ZeRO, arXiv 1910.02054, figure 1 and section 5.
    """
    whole, shared = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
    return whole + shared / ranks


def zero_bytes(parameters: float, ranks: int, stage: ZeroStage) -> float:
    """Model states of one rank in bytes; see `zero_bytes_per_parameter`."""
    return parameters * zero_bytes_per_parameter(ranks, stage)


def zero_saving(ranks: int, stage: ZeroStage) -> float:
    """How many times smaller than without ZeRO."""
    return 16 / zero_bytes_per_parameter(ranks, stage)


def activation_bytes(
    *,
    sequence: int,
    micro_batch: int,
    hidden: int,
    layers: int,
    heads: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
) -> float:
    """Saved activations of a GPT's layers in 16 bits, with dropout and unfused attention, in bytes.

    s·b·h·L · (10 + 24/t + 5·a·s/(h·t)) with tensor parallelism t; sequence parallelism divides the 10 too; selective
    recompute leaves out attention's 5·a·s/(h·t); full recompute keeps 2. Korthikanti et al., arXiv 2205.05198,
    equations 1 to 6 and table 2.
    """
    t = tensor_parallel
    if recompute == "full":
        per_value = 2.0
    else:
        per_value = 34 / t if sequence_parallel else 10 + 24 / t
        if recompute == "none":
            per_value += 5 * heads * sequence / (hidden * t)
    return sequence * micro_batch * hidden * layers * per_value
