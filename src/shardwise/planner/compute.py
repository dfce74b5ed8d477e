"""How long a chip computes: a roofline with an efficiency by shape, dtype and pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.planner.work import Gemm, Work
from shardwise.spec.calibration import HostTimes

ADAMW_BYTES = 30  # that AdamW reads and writes per parameter, about


@dataclass(frozen=True)
class Speed:
    """What one chip reaches under one software stack.

    gemm_flops: rate of a large product in the layers' dtype; head_gemm_flops: in bf16, for output heads and routers.
    """

    gemm_flops: float
    head_gemm_flops: float
    attention_flops: float  # rate over forward and backward, FLOPs counted causal, backward 2.5 times the forward
    bytes_per_second: float
    multiprocessors: int
    width: int = 2  # bytes of an activation; traffic is counted in bf16

    measured: ClassVar[bool] = False  # whether its rates are those of `calibrate`

    def under(self, *, compiled: bool) -> Speed:
        """The same where blocks are compiled: no difference, unless it was measured."""
        return self

    def gemm_seconds(self, gemm: Gemm, rate: float) -> float:
        """FLOPs over the rate that this shape reaches; never faster than its operands can be read and written."""
        compute = gemm.flops / (rate * shape_share(gemm, self.multiprocessors))
        moved = self.width * gemm.count * (gemm.m * gemm.k + gemm.n * gemm.k + gemm.m * gemm.n)
        return max(compute, moved / self.bytes_per_second)

    def forward_seconds(self, work: Work, *, head: bool = False) -> float:
        rate = self.head_gemm_flops if head else self.gemm_flops
        gemms = sum(self.gemm_seconds(gemm, rate * self._aligned(gemm)) for gemm in work.gemms)
        # The forward is 1 of 3.5 parts and runs somewhat faster than the backward.
        return gemms + work.attention_flops / (1.15 * self.attention_flops) + self._traffic_seconds(work, head=head)

    def backward_seconds(self, work: Work, *, head: bool = False) -> float:
        rate = self.head_gemm_flops if head else self.gemm_flops
        gemms = sum(
            self.gemm_seconds(Gemm(gemm.m, gemm.k, gemm.n, gemm.count), rate * self._aligned(gemm))
            + self.gemm_seconds(Gemm(gemm.n, gemm.k, gemm.m, gemm.count), rate * self._aligned(gemm))
            for gemm in work.gemms
        )
        attention = 3.5 * work.attention_flops / self.attention_flops
        attention -= work.attention_flops / (1.15 * self.attention_flops)
        return gemms + attention + 2 * self._traffic_seconds(work, head=head)

    def rotation_seconds(self, work: Work, moved: tuple[float, float]) -> tuple[float, float]:
        """Of a rotary embedding that moves so many bytes an element, forward and backward."""
        return work.rotated * moved[0] / self.bytes_per_second, work.rotated * moved[1] / self.bytes_per_second

    def head_seconds(self, work: Work, pieces: int) -> tuple[float, float]:
        """Forward and backward of output head and loss; `work` is that of one of `pieces`.

        A chunked loss (model/chunked_loss.py) makes the logits piece by piece, and of each piece at once its gradients
        with respect to input and weight: the same products in pieces and the same traffic of the loss, all in the
        forward. Nothing is made twice. On top come the sum of the weight's gradient in fp32 (10 bytes for each piece)
        and the backward, which only scales both gradients and casts the weight's (4 and 14 bytes).
        """
        once = work.traffic_bytes / self.bytes_per_second  # the backward moves as much as the forward, not twice
        forward, backward = self.forward_seconds(work, head=True), self.backward_seconds(work, head=True) - once
        if pieces > 1:
            gemm = work.gemms[0]
            forward = pieces * (forward + backward + 10 * gemm.n * gemm.k / self.bytes_per_second)
            backward = (4 * gemm.m * pieces + 14 * gemm.n) * gemm.k / self.bytes_per_second
        return forward, backward

    def update_seconds(self, parameters: float) -> float:
        """The optimizer's step on so many parameters: AdamW reads and writes 30 bytes of each, about."""
        return ADAMW_BYTES * parameters / self.bytes_per_second

    # What the constants of a stack hold implicitly, and only measured rates say apart:

    def embedding_seconds(self, elements: float, table: float, *, again: bool) -> tuple[float, float]:
        """Forward and backward of looking up `elements` in a table of so many, whose gradient is there already or
        not."""
        return 0.0, 0.0

    def cast_seconds(self, parameters: float, accumulated: float) -> tuple[float, float]:
        """A micro-batch's casts of weights and of their gradients, a share `accumulated` of which is added up."""
        return 0.0, 0.0

    def unit_seconds(self, parameters: float, shards: int) -> tuple[float, float]:
        """FSDP2's copies around one all-gather, and around one reduce-scatter."""
        return 0.0, 0.0

    def copy_seconds(self, elements: float) -> float:
        """Of activations from one place to another."""
        return 0.0

    @property
    def host(self) -> HostTimes | None:
        """What the host takes, where it was measured."""
        return None

    def _aligned(self, gemm: Gemm) -> float:
        return 1.0 if self.multiprocessors == 1 else aligned_share(gemm)  # a CPU loads any row

    def _traffic_seconds(self, work: Work, *, head: bool) -> float:
        """The head's traffic is that of the loss, which is fp32 whatever the rest is in."""
        return work.traffic_bytes * (1.0 if head else self.width / 2) / self.bytes_per_second


def aligned_share(gemm: Gemm) -> float:
    """Rate with these weight dimensions over that with multiples of 8: the fast kernels load rows of 16 bytes. Measured
    on one H200: 50,257 columns instead of 50,304 make the whole step of GPT-2 124M 1.6 times as long, which the head
    alone explains at 0.15 of its rate."""
    return 1.0 if gemm.n % 8 == 0 and gemm.k % 8 == 0 else 0.15


_TILE_M, _TILE_N = 128, 256
_FULL_K = 160  # depth at which a product reaches half its rate
_FULL_K_CORE = 64  # on one core of a CPU


def shape_share(gemm: Gemm, multiprocessors: int) -> float:
    """Share of the best rate that a shape reaches: tiles of 128 × 256 fill whole waves of multiprocessors, and a
    shallow product spends its time on the edges. One core of a CPU has no waves, and tiles of a few rows."""
    if multiprocessors == 1:
        return gemm.k / (gemm.k + _FULL_K_CORE)
    rows, columns = -(-gemm.m // _TILE_M), -(-gemm.n // _TILE_N)
    filled = gemm.m * gemm.n / (rows * _TILE_M * columns * _TILE_N)
    tiles = rows * columns * max(1.0, gemm.count)
    waves = -(-tiles // multiprocessors)
    return max(0.02, filled * tiles / (waves * multiprocessors) * gemm.k / (gemm.k + _FULL_K))
