"""FLOPs by operator, as torch's FlopCounterMode counts them: attention in full, not halved for the causal mask."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def _grouped(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """(N, in) × (G, in, out), or (in, N) × (N, out) of each group: every row meets one group's matrix."""
    return 2 * x.shape[0] * x.shape[-1] * weight.shape[-1]


def _attention(name: str, args: Any) -> int:
    """Fused attention, also with fewer key heads than query heads, which torch's own formulas refuse: scores and values
    in the forward, five products in the backward, whose first argument is the gradient."""
    backward = name.endswith("_backward")
    q, k, v = args[1:4] if backward else args[:3]
    batch, heads, rows, score = q.shape
    columns, value = k.shape[2], v.shape[3]
    return 2 * batch * heads * rows * columns * (3 * score + 2 * value if backward else score + value)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Of one call; 0 for operators that are no product."""
    packet = func._overloadpacket
    name = packet.__name__
    if name.startswith("_scaled_dot_product_") and "attention" in name:
        return _attention(name, args)
    if packet is torch.ops.aten._grouped_mm:
        return _grouped(*args)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
