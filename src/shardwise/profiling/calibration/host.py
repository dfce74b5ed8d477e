"""What the host takes, and what libraries keep: launches, layers of our eager trainer, copies, memory."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.model.block import Block
from shardwise.model.rope import rotary_table
from shardwise.profiling.calibration.clock import Clock
from shardwise.spec import Model
from shardwise.spec.calibration import Copies, HostTimes, Overheads
from shardwise.spec.memory import GIB

_LAYERS = 12
_COPIED = 2**28  # bytes
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def measure_host(clock: Clock, dtype: torch.dtype, *, quick: bool) -> HostTimes:
    """On a GPU, seconds per layer of blocks whose kernels take next to nothing. A CPU has no such floor."""
    if clock.device.type != "cuda":
        return HostTimes()
    tiny = {"name": "host", "layers": 1, "hidden": 128, "heads": 2, "ffn": 256, "vocabulary": 64, "max_sequence": 64}
    dense = _layers(clock.device, dtype, Model.load(tiny))
    routed = _layers(clock.device, dtype, Model.load({**tiny, "experts": {"count": 8, "top_k": 2, "ffn": 64}}))
    compiled = (0.0, 0.0)
    if not quick:
        try:
            compiled = _layers(clock.device, dtype, Model.load(tiny), compiled=True)
        except Exception as error:  # whatever a compiler may raise
            warnings.warn(f"torch.compile: {type(error).__name__}: {error}".splitlines()[0][:200], stacklevel=2)
    one = torch.zeros(1, device=clock.device)
    launch = _host_seconds(lambda: [one.add_(1) for _ in range(100)], clock.device) / 100
    names = ("layer_forward_us", "layer_backward_us", "expert_layer_forward_us", "expert_layer_backward_us",
             "compiled_forward_us", "compiled_backward_us")  # fmt: skip
    found = dict(zip(names, (*dense, *routed, *compiled), strict=True))
    return HostTimes.load(
        {"launch_us": round(1e6 * launch, 2), **{name: round(1e6 * t, 1) for name, t in found.items()}}
    )


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


def _layers(device: torch.device, dtype: torch.dtype, model: Model, *, compiled: bool = False) -> tuple[float, float]:
    """Seconds of the host per layer, forward and backward, of blocks with fp32 weights, as the trainer has them."""
    blocks = nn.ModuleList(Block(model, index) for index in range(_LAYERS)).to(device)
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.02)
    if compiled:
        for block in blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)  # type: ignore[method-assign]
    rope = rotary_table(model, torch.arange(16, device=device), 16, dtype)
    taken: list[tuple[float, float]] = []
    with sdpa_kernel(_BACKENDS, set_priority=True):
        for _ in range(12):
            x = torch.randn(1, 16, model.hidden, device=device, dtype=dtype, requires_grad=True)
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            y: Tensor = x
            for block in blocks:
                y = block(y, rope)
            between = time.perf_counter()
            y.sum().backward()
            torch.cuda.synchronize(device)
            taken.append((between - began, time.perf_counter() - between))
            for parameter in blocks.parameters():
                parameter.grad = None
    forward, backward = (statistics.median(series) / _LAYERS for series in zip(*taken[4:], strict=True))
    return forward, backward


def _host_seconds(work: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(7):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])
