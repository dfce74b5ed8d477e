"""Dynamic loss scaling for fp16, whose gradients would underflow without it (arXiv 1710.03740, section 3.2).

The rules and constants are those of `torch.amp.GradScaler`. That class looks for overflow in the gradients that one
rank holds, so ranks with different shards could disagree; here the global gradient norm decides, which is the same on
every rank and every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST = 2.0**16
_GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0, 0.5, 2000


class LossScale:
    """What losses are multiplied by before the backward; 1 for ever where compute is not fp16.

    A step whose gradient norm is not finite must be skipped; it halves the scale, 2,000 good steps in a row double it.
    """

    def __init__(self, compute: str):
        self.dynamic = compute == "fp16"
        self.value = _FIRST if self.dynamic else 1.0
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Note whether the step's gradient norm was finite."""
        if not self.dynamic:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.value *= _BACKOFF
        elif self._good_steps == _GROWTH_INTERVAL:
            self.value *= _GROWTH
            self._good_steps = 0

    def state(self) -> dict[str, Tensor]:
        """For checkpoints; empty where nothing changes."""
        if not self.dynamic:
            return {}
        return {"loss_scale": torch.tensor([self.value, float(self._good_steps)], dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        if self.dynamic:
            self.value, self._good_steps = state["loss_scale"][0].item(), int(state["loss_scale"][1])
