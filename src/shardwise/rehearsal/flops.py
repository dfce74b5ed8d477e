"""FLOPs by operator, as torch's FlopCounterMode counts them: attention in full, not halved for the causal mask."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def _grouped(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """(N, in) × (G, in, out), or (in, N) × (N, out) of each group: every row meets one group's matrix."""
    return 2 * x.shape[0] * x.shape[-1] * weight.shape[-1]


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Of one call; 0 for operators that are no product."""
    packet = func._overloadpacket
    if packet is torch.ops.aten._grouped_mm:
        return _grouped(*args)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
