"""Next-token loss as a sum, never a mean: means of means depend on how the batch was cut."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # label of a position that has no target


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label) in nats over all positions whose label is not IGNORED.

    logits (B, S, V), labels (B, S) -> scalar, in promote_types(logits.dtype, float32).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), labels.flatten(), ignore_index=IGNORED, reduction="sum")
