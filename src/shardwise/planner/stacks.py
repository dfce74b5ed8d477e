"""Stacks: what a training software reaches on a chip, and what it hides. The planner's own subject is `shardwise`;
the others exist so that published runs of other trainers can be predicted and the planner be scored on them.

Constants depend on the chip's generation, the precision and the software, never on a run. Where they come from, and how
well they do on runs that they were not fitted to: docs/accuracy.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardwise.planner.compute import Speed
from shardwise.planner.rates import MeasuredSpeed, Rates
from shardwise.spec import Gpu, InputError

GENERATIONS = {"a100": "ampere", "a10g": "ampere", "l4": "ada", "l40s": "ada", "h100": "hopper", "h200": "hopper",
               "b200": "blackwell", "b300": "blackwell-ultra", "gb200": "blackwell", "gb300": "blackwell-ultra",
               "vr": "rubin", "mi300x": "cdna3", "cpu": "cpu"}  # fmt: skip


def generation(gpu: Gpu) -> str:
    """What the constants of a chip are filed under: its family, and its power limit where that is unusual."""
    family = GENERATIONS.get(gpu.name.split("-")[0], "other")
    return f"{family}-500w" if gpu.name.endswith("-500w") else family


@dataclass(frozen=True)
class Stack:
    """`gemm[(generation, dtype)]`: best-shape share of the dtype's peak, sustained in training.
    `attention[generation]`: share of the bf16 peak (in fp32 of fp32's), forward and backward together, FLOPs counted
    causal.
    `traffic`: elementwise bytes over those of fused kernels. The `hides`: share of a communication that may run beside
    compute. `slowdown`: how much longer hidden communication makes the compute beside it, as a share of its own time.
    """

    name: str
    gemm: dict[tuple[str, str], float]
    attention: dict[str, float]
    traffic: float = 1.0
    rotation_bytes: tuple[float, float] | None = None  # see `rotation`
    hides_data: float = 1.0
    hides_tensor: float = 0.0
    hides_context: float = 0.8
    context_imbalance: float = 1.0  # attention over its causal share where the sequence is split
    hides_expert: float = 0.0
    slowdown: float = 0.1
    step_overhead_seconds: float = 0.0
    layer_overhead_seconds: float = 0.0  # host and launches, per layer and micro-batch, each of three passes
    expert_overhead_seconds: float = 0.0  # the same, more, for a layer with routed experts
    measures: bool = False  # its speed is that of a chip's calibration, where there is one for the dtype

    def rotation(self, width: int) -> tuple[float, float]:
        """Bytes that a rotary embedding moves per element of `width` bytes, forward and backward. Where they were not
        counted: six elements of the traffic, which is twice as much in the backward."""
        return self.rotation_bytes or (6 * width * self.traffic, 12 * width * self.traffic)

    def speed(self, gpu: Gpu, dtype: str) -> Speed:
        """Rates on this chip. Raises InputError where the chip's peak for the dtype is not known."""
        family, format_ = generation(gpu), dtype.split("-")[0]
        compute = format_ if format_ in ("fp32", "fp64") else "bf16"  # of what is no product of a block
        for wanted in dict.fromkeys((format_, compute)):
            if gpu.peak_flops(wanted) is None:
                known = ", ".join(gpu.peak_tflops) or "of no dtype"
                raise InputError(f"cluster.gpu {gpu.name}: its peak rate for {wanted} is not known; known: {known}")
        peak, wide = gpu.peak_flops(format_) or 0.0, gpu.peak_flops(compute) or 0.0
        if gpu.bandwidth_tb_s is None:
            raise InputError(f"cluster.gpu {gpu.name}: its memory bandwidth is not known")
        speed = Speed(
            gemm_flops=peak * self.gemm.get((family, dtype), 0.6),
            head_gemm_flops=wide * self.gemm.get((family, compute), 0.7),
            attention_flops=wide * self.attention.get(family, 0.35),
            bytes_per_second=0.85 * gpu.bandwidth_tb_s.value * 1e12,
            multiprocessors=gpu.multiprocessors or 128,
            width={"fp64": 8, "fp32": 4}.get(compute, 2),
        )
        if self.measures and gpu.calibration:
            rates = Rates(gpu.calibration, format_, compute)
            if rates.complete:
                return MeasuredSpeed(**vars(speed), rates=rates)
        return speed


# Printed by `python -m benchmarks.fit_stacks`: fitted to the runs of five published sources (dgxc, llmfoundry, titan,
# bloom, mbridge), with kernels shared within a family of software. docs/accuracy.md shows the other sources apart.
_TORCH_GEMM = {("ampere", "bf16"): 0.80, ("hopper", "bf16"): 0.65, ("hopper", "fp8"): 0.50,
               ("hopper-500w", "bf16"): 0.56, ("hopper-500w", "fp8"): 0.50,
               ("hopper-500w", "fp8-rowwise"): 0.265}  # fmt: skip
_TORCH_ATTENTION = {"ampere": 0.311, "hopper": 0.177, "hopper-500w": 0.243}
_MEGATRON_GEMM = {("ampere", "bf16"): 0.611, ("hopper", "bf16"): 0.76, ("hopper", "fp8"): 0.70,
                  ("blackwell", "bf16"): 0.594, ("blackwell", "fp8"): 0.568, ("blackwell", "fp4"): 0.40,
                  ("blackwell-ultra", "bf16"): 0.374, ("blackwell-ultra", "fp8"): 0.742,
                  ("blackwell-ultra", "fp4"): 0.513}  # fmt: skip
_MEGATRON_ATTENTION = {"ampere": 0.75, "hopper": 0.643, "blackwell": 0.55, "blackwell-ultra": 0.61}

# shardwise itself, eager: fitted to seven runs of its own on one H200 (`python -m benchmarks.one_gpu`), all of which it
# then gives within 7 %; context_imbalance by `python -m benchmarks.context_on_one_gpu` on it; Ampere and Blackwell are
# taken from the other software on them.
_OWN_GEMM = {("ampere", "bf16"): 0.80, ("hopper", "bf16"): 0.80, ("hopper", "fp8"): 0.62, ("blackwell", "bf16"): 0.70,
             ("blackwell", "fp8"): 0.60, ("blackwell", "fp4"): 0.40, ("blackwell-ultra", "bf16"): 0.70,
             ("blackwell-ultra", "fp8"): 0.65, ("blackwell-ultra", "fp4"): 0.51}  # fmt: skip
# `rotate` in model/layers.py: bytes per element, op by op as torch runs it (a test counts them). Forward: cast to fp32
# 6, four products of halves 16, two sums 12, cat 8, cast back 6. Backward: cast 6, negation 4, four products 16, two
# sums of gradients 12, cat of the halves 8, cast back 6.
_OWN_ROTATION = (48.0, 52.0)
_OWN_ATTENTION = {"ampere": 0.45, "hopper": 0.40, "blackwell": 0.45, "blackwell-ultra": 0.5}

STACKS = {
    stack.name: stack
    for stack in [
        Stack("shardwise", _OWN_GEMM, _OWN_ATTENTION, traffic=2.0, context_imbalance=2.05,
              rotation_bytes=_OWN_ROTATION, measures=True),
        Stack("torchtitan", _TORCH_GEMM, {**_TORCH_ATTENTION, "hopper": 0.562}, traffic=1.49, slowdown=0.104,
              hides_tensor=0.2, context_imbalance=1.37, layer_overhead_seconds=1e-3),
        Stack("fsdp1", _TORCH_GEMM, _TORCH_ATTENTION, traffic=0.8, slowdown=0.3, layer_overhead_seconds=1e-4),
        Stack("megatron", _MEGATRON_GEMM, _MEGATRON_ATTENTION, traffic=1.59, slowdown=0.026, hides_data=0.59,
              hides_tensor=0.598, hides_expert=0.594, layer_overhead_seconds=2.25e-4,
              expert_overhead_seconds=1.36e-3),
        Stack("deepspeed", _MEGATRON_GEMM, {**_MEGATRON_ATTENTION, "hopper": 0.485}, traffic=0.8, hides_data=0.0,
              layer_overhead_seconds=7.5e-4),
    ]
}  # fmt: skip


def own_stack(gpu: Gpu) -> Stack:
    """Our own trainer on this chip. On a CPU communication runs on the cores that compute, so nothing hides it; its
    rates were set by six runs of 0.8M to 28M parameters on two ranks, which they give within 25 %. What `calibrate`
    measured on this chip comes first."""
    own = STACKS["shardwise"]
    if generation(gpu) == "cpu":
        shares: dict[str, Any] = {"gemm": {("cpu", "fp32"): 0.8}, "attention": {"cpu": 0.6}, "traffic": 0.8}
        # These rates were set with the rotary embedding counted as six values of that traffic.
        own = replace(own, **shares, rotation_bytes=None, hides_data=0.0, hides_context=0.0, slowdown=0.0)
    overlap = gpu.calibration.overlap if gpu.calibration else None
    return replace(own, hides_data=overlap.hides, slowdown=overlap.slowdown) if overlap else own
