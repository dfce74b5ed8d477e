"""What lies outside the allocator, what a chip has, and the verdict."""

from __future__ import annotations

from shardwise.planner.memory.families import GIB, Family
from shardwise.spec import Gpu, Layout
from shardwise.spec.memory import Memory
from shardwise.spec.plan import Verdict

MIB = 2**20
VERDICTS: tuple[Verdict, ...] = ("fits", "unknown", "tight", "oom")  # the best first

# Total that nvidia-smi shows, MiB: the H200's as seen here, the others' as commonly posted. A data sheet's GB are
# GiB on some chips and 1e9 bytes on others, so chips that are not listed count as the smaller.
_VISIBLE_MIB = {
    "l4": 23034,
    "a10g": 23028,
    "l40s": 46068,
    "a100-40-sxm": 40960,
    "a100-80-sxm": 81920,
    "a100-80-pcie": 81920,
    "h100-sxm": 81559,
    "h100-pcie": 81559,
    "h200-sxm": 143771,
}
_DRIVER = 0.6 * GIB  # of the total, what no process gets


def outside_bytes(layout: Layout, family: Family) -> tuple[float, float]:
    """The communicators' buffers, and the process with its CUDA context, loaded kernels and libraries."""
    degrees = (layout.dp_shard * layout.cp, layout.dp_replicate, layout.tp, layout.pp, layout.ep, layout.cp)
    groups = sum(degree > 1 for degree in degrees)
    communication = family.first_group + family.group * (groups - 1) if groups else 0.0
    return communication, family.context


def capacity_bytes(gpu: Gpu) -> float | None:
    """What a process can use of the chip's memory; None where that is not known."""
    if gpu.name in _VISIBLE_MIB:
        return _VISIBLE_MIB[gpu.name] * MIB - _DRIVER
    if gpu.memory_gb is None:
        return None
    return gpu.memory_gb.value * 1e9 - _DRIVER


def verdict(memory: Memory, gpu: Gpu) -> Verdict:
    """`fits` where even the high end of the band does, `oom` where not even the low end does, else `tight`; `unknown`
    where nobody said what the chip has."""
    low, _, high = memory.used
    capacity = capacity_bytes(gpu)
    if capacity is None:
        return "unknown"
    return "fits" if high <= capacity else "oom" if low > capacity else "tight"
