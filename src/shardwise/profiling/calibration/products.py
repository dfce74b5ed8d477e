"""Matrix products: forward, gradient of the input, gradient of the weight; dense ones, and those of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.planner.work import block_work, head_work
from shardwise.profiling.calibration.clock import Clock, Pool
from shardwise.spec import Layout
from shardwise.spec.calibration import ProductRate
from shardwise.spec.presets import model_names, model_preset

_PRESETS = ("gpt2-124m", "gpt2-350m", "gpt2-1.5b", "llama3.2-1b", "llama3-8b", "qwen3-8b", "llama3-70b")
_ROWS = (1024, 2048, 4096, 8192, 16384, 65536)
_CPU_ROWS = (32, 128, 512, 2048, 8192)
_CPU_FLOPS = 4.0e9  # of the largest product, so that one takes a fraction of a second
_MOST_ELEMENTS = 2**32  # of one matrix on a GPU
# (experts, n, k, rows of each): a layer's local experts, of few and of many tokens
_EXPERTS = ((8, 14336, 4096), (16, 1408, 2048), (32, 768, 2048), (64, 2048, 7168))
_EXPERT_ROWS = (64, 256, 1024, 4096)


def shapes(device: str, *, quick: bool) -> list[tuple[int, int]]:
    """(n, k) of the weights: a grid over hidden and inner sizes, vocabularies, and those of known models."""
    if device == "cpu":
        sizes = (64, 256, 1024) if quick else (64, 128, 256, 512, 1024)
        pairs = [(n, k) for n in sizes for k in sizes]
        pairs += [(n, k) for k in sizes for n in (4 * k, 3 * k)] + [(k, 4 * k) for k in sizes]
        pairs += [(n, k) for n in (256, 4096, 32768) for k in sizes if n * k <= 2**24]
        return sorted(set(pairs))
    sizes = (1024, 4096, 8192) if quick else (512, 1024, 2048, 4096, 8192)
    pairs = [(n, k) for n in sizes for k in sizes]
    pairs += [(n, k) for k in sizes for n in (4 * k,)] + [(k, 4 * k) for k in sizes]
    pairs += [(n, k) for n in (32768, 131072) for k in sizes if n * k <= 2**30]
    if not quick:
        for name in _PRESETS:
            if name in model_names():
                model = model_preset(name)
                work = block_work(model, Layout(), 1, 1024, layer=0) + head_work(model, Layout(), 1)
                pairs += [(round(gemm.n / gemm.parts), round(gemm.k)) for gemm in work.gemms]
    return sorted(set(pairs))


def measure_products(clock: Clock, pool: Pool, dtype: str, *, quick: bool) -> Iterator[ProductRate]:
    """One ProductRate for every shape that fits, of `pool`'s dtype."""
    device = clock.device.type
    for n, k in shapes(device, quick=quick):
        most = _CPU_FLOPS / (4 if quick else 1) if device == "cpu" else math.inf
        rows = [
            m
            for m in rows_of(device, quick=quick)
            if 2 * m * n * k <= most and max(m * k, n * k, m * n) <= min(pool.elements, _MOST_ELEMENTS)
        ]
        series: dict[str, list[float]] = {"forward": [], "input_gradient": [], "weight_gradient": []}
        for m in rows:
            x, w, dy = pool.take(0, m, k), pool.take(1, n, k), pool.take(2, m, n)
            for kind, work in _passes(x, w, dy).items():
                series[kind].append(tflops(2 * m * n * k, clock.seconds(work, keeps=kind == "forward")))
        if rows:
            yield ProductRate.load({"dtype": dtype, "n": n, "k": k, "rows": rows, **series})


def rows_of(device: str, *, quick: bool) -> tuple[int, ...]:
    rows = _CPU_ROWS if device == "cpu" else _ROWS
    return rows[::2] if quick else rows


def measure_fp8(clock: Clock, *, quick: bool) -> Iterator[ProductRate]:
    """Products of fp8 operands (torch._scaled_mm) with one scale each, where the chip has them. The gradients are those
    of transposed operands, which a recipe must have made; making them is not measured."""
    if clock.device.type != "cuda" or torch.cuda.get_device_capability(clock.device) < (8, 9):
        return
    one = torch.ones((), device=clock.device)
    for n, k in shapes("cuda", quick=quick):
        if n % 16 or k % 16 or n > 20000:
            continue
        rows = [1024, 8192, 65536]
        series: dict[str, list[float]] = {"forward": [], "input_gradient": [], "weight_gradient": []}
        for m in rows:
            sides = {"forward": (m, n, k), "input_gradient": (m, k, n), "weight_gradient": (n, k, m)}
            for kind, (height, width, depth) in sides.items():
                left = torch.randn(height, depth, device=clock.device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
                right = torch.randn(width, depth, device=clock.device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)

                def work(left: Any = left, right: Any = right, fast: bool = kind == "forward") -> object:
                    return torch._scaled_mm(left, right.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

                series[kind].append(tflops(2 * m * n * k, clock.seconds(work)))
        yield ProductRate.load({"dtype": "fp8", "n": n, "k": k, "rows": rows, **series})


def measure_experts(clock: Clock, *, quick: bool) -> Iterator[ProductRate]:
    """Grouped products in bf16 on a GPU, with as many rows for each expert. Elsewhere experts are products one by
    one."""
    if clock.device.type != "cuda":
        return
    for groups, n, k in _EXPERTS[:: 2 if quick else 1]:
        for columns, depth in ((n, k), (k, n)):
            series: dict[str, list[float]] = {"forward": [], "input_gradient": [], "weight_gradient": []}
            weight = torch.randn(groups, columns, depth, device=clock.device, dtype=torch.bfloat16)
            for rows in _EXPERT_ROWS:
                x = torch.randn(groups * rows, depth, device=clock.device, dtype=torch.bfloat16)
                dy = torch.randn(groups * rows, columns, device=clock.device, dtype=torch.bfloat16)
                ends = torch.arange(1, groups + 1, device=clock.device, dtype=torch.int32) * rows
                for kind, work in _grouped(x, weight, dy, ends).items():
                    series[kind].append(tflops(2 * groups * rows * columns * depth, clock.seconds(work)))
            given = {"dtype": "bf16", "n": columns, "k": depth, "groups": groups, "rows": _EXPERT_ROWS}
            yield ProductRate.load({**given, **series})


def _passes(x: Any, w: Any, dy: Any) -> dict[str, Callable[[], object]]:
    return {
        "forward": lambda: F.linear(x, w),
        "input_gradient": lambda: dy @ w,
        "weight_gradient": lambda: dy.T @ x,
    }


def _grouped(x: Any, w: Any, dy: Any, ends: Any) -> dict[str, Callable[[], object]]:
    return {
        "forward": lambda: F.grouped_mm(x, w.transpose(-2, -1), offs=ends),
        "input_gradient": lambda: F.grouped_mm(dy, w, offs=ends),
        "weight_gradient": lambda: F.grouped_mm(dy.T, x, offs=ends),
    }


def tflops(flops: float, seconds: float) -> float:
    rate = flops / seconds / 1e12
    digits = 4 - math.ceil(math.log10(rate)) if rate > 0 else 4
    return round(rate, max(1, digits))
