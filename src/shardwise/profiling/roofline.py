"""The least time that an operator can take on a chip: FLOPs over its peak, or bytes over its memory's bandwidth."""

from __future__ import annotations

from typing import Any

from shardwise.spec.presets import gpu_called

_DTYPES = {"c10::BFloat16": ("bf16", 2), "c10::Half": ("bf16", 2), "float": ("fp32", 4), "double": ("fp64", 8),
           "c10::Float8_e4m3fn": ("fp8", 1), "c10::Float8_e5m2": ("fp8", 1)}  # fmt: skip
_PRODUCTS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::_scaled_mm": (0, 1)}


class Roofline:
    """Bounds of matrix products on one chip; NaN for anything else, and where the chip or its rate is not known."""

    def __init__(self, chip: str | None):
        gpu = gpu_called(chip) if chip else None
        self._gpu = gpu
        self._bandwidth = gpu.bandwidth_tb_s.value * 1e12 if gpu and gpu.bandwidth_tb_s else None

    def seconds(self, operator: str, arguments: dict[str, Any]) -> float:
        """`arguments`: of the operator's event, with `Input Dims` and `Input type`. Shapes: (…, m, k) by (…, k, n)."""
        places = _PRODUCTS.get(operator)
        if places is None or self._gpu is None or self._bandwidth is None:
            return float("nan")
        try:
            left, right = (arguments["Input Dims"][place] for place in places)
            dtype, width = _DTYPES[arguments["Input type"][places[0]]]
            *batch, m, k = left
            n = right[-1]
        except (KeyError, IndexError, TypeError, ValueError):
            return float("nan")
        peak = self._gpu.peak_flops(dtype)
        if peak is None:
            return float("nan")
        count = 1
        for size in batch:
            count *= size
        moved = width * count * (m * k + k * n + m * n)
        return float(max(2 * count * m * n * k / peak, moved / self._bandwidth))
