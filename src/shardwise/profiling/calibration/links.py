"""How fast the ranks of this process group exchange data, and what that costs the compute beside it."""

from __future__ import annotations

import datetime
import math
import statistics
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.profiling.calibration.clock import Clock
from shardwise.spec.calibration import Overlap
from shardwise.spec.cluster import Link

_SIZES = tuple(2**power for power in range(14, 31, 2))  # bytes
_CPU_SIZES = tuple(2**power for power in range(12, 27, 2))
_ROUNDS = 5


def measure_link(clock: Clock, source: str, *, quick: bool) -> Link:
    """Bandwidth by message size of each kind of exchange over all ranks, of which there must be at least two."""
    # From torch 2.13 on the names that 2.11 has are deprecated.
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
    ranks, device = dist.get_world_size(), clock.device
    sizes = (_CPU_SIZES if device.type == "cpu" else _SIZES)[: -1 if quick else None]
    tiny = torch.ones(1, device=device)
    latency = clock.seconds(lambda: dist.all_reduce(tiny)) / math.log2(ranks)
    curves: dict[str, list[tuple[float, float]]] = {}
    for size in sizes:
        whole = torch.ones(size // 4 // ranks * ranks, device=device)
        for name, (work, moved, message, hops) in _exchanges(whole, ranks).items():
            taken = clock.seconds(work)
            # The planner adds the latency; where that is most of the time, what is left is not known to any precision.
            rate = moved / max(taken - latency * hops, 0.2 * taken) / 1e9
            curves.setdefault(name, []).append((float(message), float(f"{rate:.4g}")))
    return Link.load(
        {
            "name": f"{dist.get_backend()}-{ranks}",
            "latency_us": round(max(0.01, 1e6 * latency), 2),
            "class": "measured",
            "source": source,
            "date": datetime.date.today(),
            **curves,
        },
        "link",
    )


def _exchanges(whole: Tensor, ranks: int) -> dict[str, tuple[Callable[[], object], float, float, float]]:
    """Curve of a Link: the exchange, bytes over the link, its message in the planner's sense, hops."""
    size, hops = whole.nbytes, math.log2(ranks)
    part, other = torch.ones_like(whole[: len(whole) // ranks]), torch.ones_like(whole)
    share = (ranks - 1) / ranks
    return {
        "curve": (lambda: dist.all_gather_into_tensor(whole, part), share * size, size, hops),
        "scatter_curve": (lambda: dist.reduce_scatter_tensor(part, whole), share * size, size, hops),
        "reduce_curve": (lambda: dist.all_reduce(whole), 2 * share * size, size, hops),
        "exchange_curve": (lambda: dist.all_to_all_single(other, whole), share * size, share * size, hops),
        "hop_curve": (lambda: _hop(whole), size, size, 1.0),
    }


def _hop(message: Tensor) -> None:
    """Every even rank sends to the next one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank % 2 == 0 and rank + 1 < ranks:
        dist.send(message, rank + 1)
    elif rank % 2:
        dist.recv(message, rank - 1)


def measure_overlap(clock: Clock) -> Overlap:
    """Products that take about twice as long as an all-gather and a reduce-scatter, alone and beside them. What all of
    it takes beyond the products, as a share of the exchanges, is the products' slowdown where it is small, else what is
    not hidden."""
    device, ranks = clock.device, dist.get_world_size()
    cpu = device.type == "cpu"
    dtype, size = (torch.float32, 512) if cpu else (torch.bfloat16, 8192)
    left = torch.randn(size, size, device=device).to(dtype)
    whole = torch.ones((2**19 if cpu else 2**26) // ranks * ranks, device=device)
    part, summed = (torch.ones_like(whole[: len(whole) // ranks]) for _ in range(2))
    gradient = torch.ones_like(whole)

    def start() -> list[dist.Work]:
        return [
            dist.all_gather_into_tensor(whole, part, async_op=True),
            dist.reduce_scatter_tensor(summed, gradient, async_op=True),
        ]

    def exchange() -> None:
        for work in start():
            work.wait()

    exchanged = clock.seconds(exchange)
    count = max(1, round(2 * exchanged / clock.seconds(lambda: left @ left)))

    def compute() -> None:
        for _ in range(count):
            torch.mm(left, left)

    def both() -> None:
        works = start()
        compute()
        for work in works:
            work.wait()

    # In turns, so that what else the machine does meets all three alike.
    rounds = [[clock.seconds(work) for work in (both, compute, exchange)] for _ in range(_ROUNDS)]
    cost = max(0.0, statistics.median((beside - alone) / moved for beside, alone, moved in rounds))
    if cost < 0.5:
        return Overlap(slowdown=round(cost, 3), hides=1.0)
    return Overlap(slowdown=0.0, hides=round(max(0.0, 1.0 - cost), 3))
