"""Everything that `calibrate` measures, in order, as a Cluster."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.profiling.calibration.attention import measure_attention
from shardwise.profiling.calibration.clock import Clock, Pool
from shardwise.profiling.calibration.host import context_bytes, launch_us, measure_copies, overheads
from shardwise.profiling.calibration.links import measure_link, measure_overlap
from shardwise.profiling.calibration.memory_bound import measure_memory_bound
from shardwise.profiling.calibration.products import measure_experts, measure_fp8, measure_products
from shardwise.spec import Cluster, Gpu
from shardwise.spec.calibration import Calibration, HostTimes
from shardwise.spec.presets import gpu_called, gpu_preset

Say = Callable[[str], None]
Row = TypeVar("Row")
_POOL = 2**26  # elements on a CPU; on a GPU a share of its memory


def measure(device: torch.device, command: str, say: Say, *, host: HostTimes, quick: bool = False) -> Cluster:
    """This machine as a Cluster of as many chips as there are ranks. Every rank of the process group calls it.

    host: what was measured of it before (rehearsal/host_times.py). Peaks that a data sheet or somebody else states
    stay. Those of a CPU, and of a GPU that no preset knows, are the fastest product measured.
    """
    ranks = dist.get_world_size()
    before = context_bytes(device)
    clock = Clock(device, quick=quick, together=ranks > 1)
    dtype, torch_dtype = ("bf16", torch.bfloat16) if device.type == "cuda" else ("fp32", torch.float32)
    progress = _Progress(say)
    copies = progress.one("copies", lambda: measure_copies(clock))
    pool = Pool(device, torch_dtype, _pool_elements(device))
    products = progress.rows("products", measure_products(clock, pool, dtype, quick=quick))
    del pool
    products += progress.rows("fp8 products", measure_fp8(clock, quick=quick))
    products += progress.rows("products of experts", measure_experts(clock, quick=quick))
    attention = progress.rows("attention", measure_attention(clock, dtype, torch_dtype, quick=quick))
    bound = progress.rows("memory-bound ops", measure_memory_bound(clock, dtype, torch_dtype, quick=quick))
    host = host.model_copy(update={"launch_us": launch_us(clock)})
    found: dict[str, Any] = {
        "command": command,
        "date": datetime.date.today(),
        "device": _device_name(device),
        "torch": torch.__version__,
        "driver": _driver(device),
        "ranks": ranks,
        "quick": quick,
        "products": products,
        "attention": attention,
        "memory_bound": bound,
        "host": host,
        "copies": copies,
    }
    changes: dict[str, Any] = {}
    if ranks > 1:
        source = f"`{command}` on {found['device']}, torch {torch.__version__}, {ranks} ranks"
        changes["intra"] = progress.one("links", lambda: measure_link(clock, source, quick=quick))
        found["overlap"] = progress.one("overlap", lambda: measure_overlap(clock))
    clock.rest()
    found["overheads"] = overheads(device, before)
    calibration = Calibration.model_validate(found)
    gpu = _chip(device, calibration).model_copy(update={**changes, "calibration": calibration})
    return Cluster.load({"gpu": gpu, "gpus": ranks, "gpus_per_node": max(gpu.node, ranks)}, "cluster")


class _Progress:
    """A line for each part once it is done."""

    def __init__(self, say: Say):
        self._say, self._began = say, time.perf_counter()

    def one(self, what: str, work: Callable[[], Row]) -> Row:
        began = time.perf_counter()
        result = work()
        self._say(f"{what}: {time.perf_counter() - began:.1f} s")
        return result

    def rows(self, what: str, rows: Iterable[Row]) -> list[Row]:
        began = time.perf_counter()
        result = list(rows)
        if result:
            self._say(f"{what}: {len(result)} rows, {time.perf_counter() - began:.1f} s")
        return result


def _pool_elements(device: torch.device) -> int:
    if device.type != "cuda":
        return _POOL
    free, _ = torch.cuda.mem_get_info(device)
    return min(2**32, int(0.2 * free / 2))


def _chip(device: torch.device, calibration: Calibration) -> Gpu:
    """The preset of this chip, with measured figures where those of the preset are another machine's, or none."""
    known = gpu_called(calibration.device) if device.type == "cuda" else gpu_preset("cpu")
    if known and device.type == "cuda":
        return known
    best = {dtype: max(max(row.forward) for row in calibration.products if row.dtype == dtype)
            for dtype in dict.fromkeys(row.dtype for row in calibration.products)}  # fmt: skip
    assert calibration.copies is not None
    given: dict[str, Any] = known.dump() if known else {"name": calibration.device.lower().replace(" ", "-")}
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        given |= {"memory_gb": round(facts.total_memory / 1e9, 1), "multiprocessors": facts.multi_processor_count}
        given["device_names"] = [calibration.device]
    origin = {"class": "measured", "source": f"the fastest seen by {calibration.source}", "date": calibration.date}
    return Gpu.load(
        {**given, "peak_tflops": best, "bandwidth_tb_s": calibration.copies.device_gb_s / 1e3, **origin}, "gpu"
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} thread(s) a rank"


def _driver(device: torch.device) -> str | None:
    """As the kernel module names itself; None where it does not, or on a CPU."""
    version = Path("/proc/driver/nvidia/version")
    if device.type != "cuda" or not version.exists():
        return None
    words = version.read_text().split("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
