"""Rates that `calibrate` measured, interpolated; what the planner computes with where a chip has them.

Products: along the rows in log-log steps, between weights by inverse squared distance in (log n, log k). Attention:
along the length, of the nearest head sizes. Other ops: seconds along the number of elements. Nothing is fitted.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from shardwise.planner.compute import Speed, aligned_share
from shardwise.planner.work import Elements, Gemm, Scores, Work
from shardwise.spec.calibration import AttentionRate, Calibration, HostTimes, MemoryBound, ProductRate

_PREFERRED = ("cudnn", "flash", "efficient", "math", "cpu")  # training/loop.py's order
_NEIGHBOURS = 4


def along(sizes: Sequence[float], values: Sequence[float], size: float, *, below: float, above: float) -> float:
    """Log-log interpolation of values at ascending sizes; outside, value ∝ size to the power `below` or `above`."""
    if size <= sizes[0]:
        return values[0] * float(size / sizes[0]) ** below
    if size >= sizes[-1]:
        return values[-1] * float(size / sizes[-1]) ** above
    right = bisect.bisect_left(sizes, size)
    low, high = sizes[right - 1], sizes[right]
    share = math.log(size / low) / math.log(high / low)
    return values[right - 1] * float(values[right] / values[right - 1]) ** share


class Rates:
    """One Calibration, asked for products in `dtype` and for everything else in `compute`."""

    def __init__(self, calibration: Calibration, dtype: str, compute: str):
        self.host, self.copies = calibration.host, calibration.copies
        self._products = {kind: [row for row in calibration.products if row.dtype == kind] for kind in (dtype, compute)}
        self._dtype, self._compute = dtype, compute
        self._attention = [row for row in calibration.attention if row.dtype == compute]
        self._ops: dict[tuple[str, bool], MemoryBound] = {
            (row.op, row.compiled): row for row in calibration.memory_bound if row.dtype == compute
        }
        self._remembered: dict[tuple[Gemm, str, bool], float] = {}

    @property
    def complete(self) -> bool:
        """Whether there is enough to do without the constants of a stack."""
        return all(self._products.values()) and bool(self._ops)

    def product_seconds(self, gemm: Gemm, kind: str, *, head: bool = False) -> float:
        """kind: forward, input_gradient or weight_gradient of the product that `gemm` is in the forward."""
        key = (gemm, kind, head)
        if key not in self._remembered:
            self._remembered[key] = gemm.flops / (1e12 * self._rate(gemm, kind, head))
        return self._remembered[key]

    def _rate(self, gemm: Gemm, kind: str, head: bool) -> float:
        rows = self._products[self._compute if head else self._dtype]
        n = gemm.n / gemm.parts
        grouped = [row for row in rows if row.groups > 1] if gemm.grouped else []
        rows = grouped or [row for row in rows if row.groups == 1]
        alike = [row for row in rows if _aligned(row.n, row.k) == _aligned(n, gemm.k)]
        share = 1.0 if alike else aligned_share(gemm)
        near = sorted((_distance(row, n, gemm.k), index) for index, row in enumerate(alike or rows))[:_NEIGHBOURS]
        found = [(distance, self._at(((alike or rows)[index]), kind, gemm.m)) for distance, index in near]
        if found[0][0] < 1e-9:
            return share * found[0][1]
        weights = [distance**-2 for distance, _ in found]
        mean = sum(weight * math.log(rate) for weight, (_, rate) in zip(weights, found, strict=True)) / sum(weights)
        return share * math.exp(mean)

    def _at(self, row: ProductRate, kind: str, m: float) -> float:
        return along(row.rows, getattr(row, kind), m, below=1.0, above=0.0)

    def attention_seconds(self, scores: Scores, kind: str) -> float | None:
        """kind: forward or backward; None where none was measured."""
        if not self._attention or not scores.flops:
            return None if scores.flops else 0.0
        best = next(name for name in _PREFERRED if any(row.backend == name for row in self._attention))
        row = min((row for row in self._attention if row.backend == best), key=lambda row: _unlike(row, scores))
        rate = along(row.lengths, getattr(row, kind), scores.length, below=0.5, above=0.0)
        return scores.flops * (2.5 if kind == "backward" else 1.0) / (1e12 * rate)

    def op_seconds(self, op: str, elements: float, kind: str = "forward", *, compiled: bool = False) -> float | None:
        """Of one op on so many elements; None where it was not measured."""
        row = self._ops.get((op, True)) if compiled else None
        row = row or self._ops.get((op, False))
        if row is None or not elements:
            return None if elements else 0.0
        series = row.backward_us if kind == "backward" and row.backward_us else row.forward_us
        return 1e-6 * along(row.elements, series, elements, below=0.0, above=1.0)

    def has_compiled(self) -> bool:
        return any(compiled for _, compiled in self._ops)


def _aligned(n: float, k: float) -> bool:
    return n % 8 == 0 and k % 8 == 0


def _distance(row: ProductRate, n: float, k: float) -> float:
    return math.hypot(math.log(row.n / n), math.log(row.k / k))


def _unlike(row: AttentionRate, scores: Scores) -> float:
    pairs = ((row.head_dim, scores.head_dim), (row.value_dim, scores.value_dim))
    return sum(abs(math.log(one / other)) for one, other in pairs) + 0.1 * abs(
        math.log(row.queries_per_key / scores.queries_per_key)
    )


@dataclass(frozen=True, eq=False)
class MeasuredSpeed(Speed):
    """A Speed of measured rates. The fields of Speed stand in for what was not measured."""

    measured: ClassVar[bool] = True
    rates: Rates | None = None
    compiled: bool = False

    @property
    def _rates(self) -> Rates:
        assert self.rates is not None
        return self.rates

    def under(self, *, compiled: bool) -> MeasuredSpeed:
        return replace(self, compiled=True) if compiled and self._rates.has_compiled() else self

    def forward_seconds(self, work: Work, *, head: bool = False) -> float:
        products = sum(self._rates.product_seconds(gemm, "forward", head=head) for gemm in work.gemms)
        return products + self._attention_seconds(work, "forward") + self._elements_seconds(work, "forward")

    def backward_seconds(self, work: Work, *, head: bool = False) -> float:
        products = sum(
            self._rates.product_seconds(gemm, kind, head=head)
            for gemm in work.gemms
            for kind in ("input_gradient", "weight_gradient")
        )
        return products + self._attention_seconds(work, "backward") + self._elements_seconds(work, "backward")

    def rotation_seconds(self, work: Work, moved: tuple[float, float]) -> tuple[float, float]:
        return 0.0, 0.0  # among the elements

    def head_seconds(self, work: Work, pieces: int) -> tuple[float, float]:
        forward, backward = self.forward_seconds(work, head=True), self.backward_seconds(work, head=True)
        if pieces == 1:
            return forward, backward
        gemm = work.gemms[0]
        weights, rows = gemm.n * gemm.k, gemm.m * gemm.k * pieces
        # The loss and its gradient are one op here, so the backward has none of its own.
        once = sum(self._one(item, "backward") for item in work.elements if item.op == "chunked_loss")
        forward = pieces * (forward + backward - once + self._op("accumulate", weights))
        return forward, self._op("accumulate", weights) + self._op("cast", weights) + self._op("residual", rows)

    def update_seconds(self, parameters: float) -> float:
        """Norm, clipping and AdamW."""
        return self._op("clip", parameters) + self._op("adamw", parameters)

    def embedding_seconds(self, elements: float, table: float, *, again: bool) -> tuple[float, float]:
        """Rows are gathered; the backward fills a gradient as large as the table, and adds it to another one where
        there is one already."""
        filled = self._op("accumulate", table) * (1.0 if again else 0.25)
        return self._op("embedding", elements), self._op("embedding", elements, "backward") + filled

    def cast_seconds(self, parameters: float, accumulated: float) -> tuple[float, float]:
        forward, backward = self._op("cast", parameters), self._op("cast", parameters, "backward")
        return forward, backward + accumulated * self._op("accumulate", parameters)

    def unit_seconds(self, parameters: float, shards: int) -> tuple[float, float]:
        own = parameters / shards
        gather = self._op("cast", own) + self._op("copy", parameters)
        return gather, self._op("reduce_input", parameters) + self._op("accumulate", own)

    def copy_seconds(self, elements: float) -> float:
        return self._op("copy", elements)

    @property
    def host(self) -> HostTimes:
        return self._rates.host

    def _attention_seconds(self, work: Work, kind: str) -> float:
        known = [self._rates.attention_seconds(scores, kind) for scores in work.scores]
        if None in known:
            share = 1 / 1.15 if kind == "forward" else 3.5 - 1 / 1.15
            return share * work.attention_flops / self.attention_flops
        return sum(item or 0.0 for item in known)

    def _elements_seconds(self, work: Work, kind: str) -> float:
        # Compiled, a norm is measured together with the sum before it.
        return sum(self._one(item, kind) for item in work.elements if not (self.compiled and item.op == "residual"))

    def _one(self, item: Elements, kind: str) -> float:
        return self._op(item.op, getattr(item, kind), kind)

    def _op(self, op: str, elements: float, kind: str = "forward") -> float:
        seconds = self._rates.op_seconds(op, elements, kind, compiled=self.compiled)
        return 3 * elements * self.width / self.bytes_per_second if seconds is None else seconds
