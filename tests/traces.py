"""Synthetic traces of PyTorch's profiler, and an analysis of any trace by brute force."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
NCCL = {
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
    "reduce_scatter": ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(int)", "_reduce_scatter_base"),
    "all_reduce": ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", "allreduce"),
    "send_recv": ("ncclDevKernel_SendRecv(int)", "send"),
    "all_to_all": ("ncclDevKernel_SendRecv(int)", "all_to_allv"),
}


class TraceBuilder:
    """Times in milliseconds."""

    def __init__(self, rank: int = 0, world: int = 2, chip: str = "NVIDIA H100 80GB HBM3"):
        self.events: list[dict[str, Any]] = []
        self._rank, self._world, self._chip, self._correlation = rank, world, chip, 0

    def kernel(self, start: float, end: float, name: str = GEMM, *, launched: float | None = None, stream: int = 7,
               **arguments: Any) -> None:  # fmt: skip
        """`launched`: by default as it starts."""
        self._correlation += 1
        self._add("kernel", name, start, end, 0, {"stream": stream, "correlation": self._correlation, **arguments})
        at = start if launched is None else launched
        self._add("cuda_runtime", "cudaLaunchKernel", at, at + 0.002, 1, {"correlation": self._correlation})

    def collective(self, start: float, end: float, kind: str, group: str = "0", called: str = "", **more: Any) -> None:
        name, collective = NCCL[kind]
        words = {"Collective name": collective, "Process Group Name": group, "Process Group Description": called}
        self.kernel(start, end, name, launched=more.pop("launched", start), stream=20, **words, **more)

    def copy(self, start: float, end: float, direction: str = "HtoD") -> None:
        self._add("gpu_memcpy", f"Memcpy {direction} (Pinned -> Device)", start, end, 0, {"stream": 9})

    def note(self, start: float, end: float, name: str) -> None:
        self._add("user_annotation", name, start, end, 1, {})

    def call(self, start: float, end: float, name: str) -> None:
        self._add("cuda_runtime", name, start, end, 1, {})

    def operator(self, start: float, end: float, name: str, **arguments: Any) -> None:
        self._add("cpu_op", name, start, end, 1, arguments)

    def step(self, start: float, end: float) -> None:
        number = sum(event["name"].startswith("ProfilerStep") for event in self.events)
        self.note(start, end, f"ProfilerStep#{number}")

    def write(self, path: Path) -> Path:
        data = {
            "distributedInfo": {"rank": self._rank, "world_size": self._world},
            "deviceProperties": [{"name": self._chip}],
            "traceEvents": self.events,
        }
        text = json.dumps(data).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    def _add(self, category: str, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "ts": 1e9 + start * 1e3, "dur": (end - start) * 1e3, "pid": 1,
             "tid": thread, "args": arguments}
        )  # fmt: skip


def sweep(spans: list[tuple[float, float, str]], window: tuple[float, float], order: list[str]) -> dict[str, float]:
    """Seconds of the window in which each label is the first, in `order`, of those that are open; '' where none is. By
    looking at every stretch between two neighbouring edges."""
    low, high = window
    spans = [(max(start, low), min(end, high), label) for start, end, label in spans if end > low and start < high]
    edges = sorted({low, high, *(edge for start, end, _ in spans for edge in (start, end))})
    opening: dict[float, list[str]] = {}
    closing: dict[float, list[str]] = {}
    for start, end, label in spans:
        opening.setdefault(start, []).append(label)
        closing.setdefault(end, []).append(label)
    active = dict.fromkeys(order, 0)
    result = dict.fromkeys([*order, ""], 0.0)
    for edge, following in pairwise(edges):
        for label in closing.get(edge, ()):
            active[label] -= 1
        for label in opening.get(edge, ()):
            active[label] += 1
        result[next((label for label in order if active[label]), "")] += following - edge
    return result
