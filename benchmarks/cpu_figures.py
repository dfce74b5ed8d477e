"""The figures of the `cpu` preset, measured on this machine: two ranks at once, one thread each, as `train --nproc 2`
starts them on two cores.

    python -m benchmarks.cpu_figures

Prints JSON: the fp32 rate of large products and the memory bandwidth per rank (read and written, while the other does
the same), the memory of a rank without a model, and of gloo between the two the latency and, by message size, the bus
bandwidth of all-reduce and all-gather in NCCL's sense. The presets (`src/shardwise/spec/presets`) hold what it printed
here; another CPU has other figures.
"""

from __future__ import annotations

import json
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

RANKS = 2
SIZES = [2**power for power in range(18, 27, 2)]  # bytes: 256 KiB to 64 MiB


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The fastest of `repeats` runs, because others may use the machine; both ranks start each run together."""
    taken = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def measure(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    resident = process_bytes()
    size = 2048
    left, right = torch.randn(size, size), torch.randn(size, size)
    product = seconds(lambda: left @ right, 25)
    source = torch.ones(2**28)  # 1 GiB, which no cache holds
    target = torch.empty_like(source)
    copied = seconds(lambda: target.copy_(source), 15)
    reduced, gathered = {}, {}
    for message in SIZES:
        whole = torch.ones(message // 4)
        part = torch.ones(message // 4 // RANKS)
        repeats = 25
        reduced[message] = seconds(lambda whole=whole: dist.all_reduce(whole), repeats)
        parts = list(whole.chunk(RANKS))
        gathered[message] = seconds(lambda parts=parts, part=part: dist.all_gather(parts, part), repeats)
    tiny = torch.ones(1)
    latency = seconds(lambda: dist.all_reduce(tiny), 101)
    if rank == 0:
        share = (RANKS - 1) / RANKS
        answer = {
            "machine": machine(),
            "torch": torch.__version__,
            "fp32_tflops_per_rank": round(2 * size**3 / product / 1e12, 4),
            "bandwidth_tb_s_per_rank": round(2 * 2**30 / copied / 1e12, 4),
            "resident_gib": round(resident / 2**30, 3),
            "latency_us": round(1e6 * latency, 1),
            "all_reduce_gb_s": {m: round(2 * share * m / t / 1e9, 4) for m, t in reduced.items()},
            "all_gather_gb_s": {m: round(share * m / t / 1e9, 4) for m, t in gathered.items()},
        }
        print(json.dumps(answer, indent=1))
    dist.destroy_process_group()


def process_bytes() -> int:
    """Of a rank that has loaded all it needs, but no model: after one step of one small product."""
    import shardwise.verbs.session  # noqa: F401

    weight = torch.zeros(8, 8, requires_grad=True)
    (weight @ weight).sum().backward()
    torch.optim.AdamW([weight]).step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine() -> str:
    """The processor as Linux names it, else what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    from shardwise.launching.local import _free_port

    multiprocessing.spawn(measure, args=(_free_port(),), nprocs=RANKS)
