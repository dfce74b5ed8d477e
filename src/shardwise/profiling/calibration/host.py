"""Launches and copies, and the memory that libraries keep."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from shardwise.profiling.calibration.clock import Clock
from shardwise.spec.calibration import Copies, Overheads
from shardwise.spec.memory import GIB

_COPIED = 2**28  # bytes


def launch_us(clock: Clock) -> float:
    """Of the smallest kernel. A CPU launches none."""
    if clock.device.type != "cuda":
        return 0.0
    one = torch.zeros(1, device=clock.device)
    return round(1e4 * _host_seconds(lambda: [one.add_(1) for _ in range(100)], clock.device), 2)


def measure_copies(clock: Clock) -> Copies:
    """Large copies: within the device, and over the link to pinned host memory."""
    size = _COPIED if clock.device.type == "cuda" else _COPIED // 8
    source = torch.randint(255, (size,), device=clock.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    found = {"device_gb_s": 2 * size / clock.seconds(lambda: target.copy_(source)) / 1e9}
    if clock.device.type == "cuda":
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found["to_device_gb_s"] = size / clock.seconds(lambda: target.copy_(pinned, non_blocking=True)) / 1e9
        found["to_host_gb_s"] = size / clock.seconds(lambda: pinned.copy_(source, non_blocking=True)) / 1e9
    return Copies.load({name: round(rate, 3) for name, rate in found.items()})


def context_bytes(device: torch.device) -> float:
    """What the driver shows as used beyond what torch's allocator has reserved, of this process alone as far as nobody
    else uses the device. Call it before the first large tensor, and again at the end."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def overheads(device: torch.device, before: float) -> Overheads:
    """Of the context (before anything ran), and workspaces: what it grew by, and what libraries hold in torch's own
    allocator when no tensor is left."""
    if device.type != "cuda":
        return Overheads()
    torch.cuda.synchronize(device)
    held = max(0.0, context_bytes(device) - before) + torch.cuda.memory_allocated(device)
    return Overheads.load({"context_gib": round(before / GIB, 4), "workspaces_gib": round(held / GIB, 4)})


def _host_seconds(work: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(7):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])
