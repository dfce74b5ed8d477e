"""Step: what the training loop yields, one per optimizer step, and one line of metrics.jsonl."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """What is true of one finished optimizer step. `None` is unknown, never zero.

    mfu and hfu count attention causally; `mfu_full_attention` is the other convention (docs/metrics.md).
    """

    step: int  # 1 for the first
    tokens: int  # trained on so far, over all ranks
    loss: float  # nats per token, mean over the global batch
    grad_norm: float | None  # before clipping; None where fp16 overflowed and the update was skipped
    lr: float
    loss_scale: float | None  # fp16 only
    step_seconds: float
    tokens_per_second: float  # over all ranks
    mfu: float | None
    mfu_full_attention: float | None
    hfu: float | None
    peak_memory_gib: float | None  # allocated on the device since the run began; resident memory on a CPU. Rank 0
    busiest_expert: float | None  # token copies of the busiest expert over the mean, in the layer where that is highest
    data_wait_fraction: float  # share of step_seconds that rank 0 waited for input

    def dump(self) -> dict[str, Any]:
        return asdict(self)
