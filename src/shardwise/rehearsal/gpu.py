"""One rank on one GPU: real kernels, a process group of which there is nobody else."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from shardwise.parallel.apply import build_parallel
from shardwise.parallel.compat import fake_process_group, gathers_without_copies, pipeline_without_votes
from shardwise.parallel.mesh import build_mesh
from shardwise.rehearsal.allocator import reserved_peak
from shardwise.rehearsal.ledger import Ledger
from shardwise.rehearsal.rank import draw, largest, stream_of
from shardwise.rehearsal.trace import forward_and_update
from shardwise.rehearsal.tracker import Tracker
from shardwise.rehearsal.where import Where
from shardwise.rehearsal.world import even_routing, received_at_random
from shardwise.spec import InputError, Run
from shardwise.spec.memory import PARTS
from shardwise.training.loop import Trainer


def on_gpu(run: Run, rank: int, steps: int, imbalance: float, directory: Path | None) -> dict[str, Any]:
    """The fields of a Rehearsal, but for what the planner says. Raises InputError where there is no GPU, or it is too
    small.

    After two steps that do not count, `steps` steps, of which the last gives memory, and all together time, as in
    training: the host goes on where it need not read a value. One more is watched, block by block, unless it is
    compiled.
    """
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here; --device cpu needs none")
    start = time.perf_counter()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as parallel/process.py
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    layout = run.fixed_layout
    fake_process_group(rank, layout.world)
    mesh = build_mesh(layout, "cuda")
    try:
        with pipeline_without_votes(), even_routing(imbalance):
            module = build_parallel(run, mesh, device)
            trainer = Trainer(run, module, lambda: False)
            forward_and_update(trainer, device)  # with gathers that fill their buffers
            with gathers_without_copies(eager=not layout.compile), received_at_random():
                forward_and_update(trainer, device)
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(steps):
                    torch.cuda.reset_peak_memory_stats()
                    forward_and_update(trainer, device)
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - began) / steps
                live, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                tracker = None if layout.compile else _watch(trainer, run)
    except torch.OutOfMemoryError:
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        raise InputError(
            f"rank {rank} does not fit this GPU of {total:.0f} GiB; --device cpu rehearses what fits no machine"
        ) from None
    parts = dict.fromkeys(PARTS, 0.0)
    ledger, peak = (tracker.ledger, tracker.ledger.peak()) if tracker else (Ledger(), None)
    if peak is not None:
        parts |= {part: float(size) for part, size in ledger.parts(peak).items()}
    parts["transient"] += live - sum(parts.values())  # libraries' workspaces; of a compiled step all of it
    block = ledger.blocks[ledger.events[peak][0]] if peak is not None else None
    return {
        "rank": rank,
        "mesh": mesh.describe(),
        "device": f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}",
        "parts": parts,
        "reserved": float(reserved),
        "reserved_default": float(reserved_peak(stream_of(ledger), expandable=False)) if tracker else None,
        "host": float(ledger.host_peak),
        "peak_op": block.operator if block else "",
        "peak_module": block.module if block else "",
        "largest": largest(ledger, peak) if peak is not None else [],
        "flops": dict(tracker.flops) if tracker else {},
        "step_seconds": seconds,
        "exact": ["live and reserved bytes: measured", "step time: measured, with collectives that do nothing"],
        "modelled": ["reserved without expandable segments: a model of torch's caching allocator"] if tracker else [],
        "seconds": time.perf_counter() - start,
        "pictures": draw(ledger, directory, f"rank {rank}, {mesh.describe()}", rank) if directory and tracker else [],
    }


def _watch(trainer: Trainer, run: Run) -> Tracker:
    module = trainer.module
    where = Where(getattr(stage, "module", stage) for stage in module.stages.values())
    tracker = Tracker(where, run.model.vocabulary // run.fixed_layout.tp, device="cuda")
    tracker.adopt(module.parameters(), "parameters")
    for state in trainer.optimizer.state.values():
        tracker.adopt((value for value in state.values() if isinstance(value, torch.Tensor)), "optimizer")
    with tracker.watching():
        tracker.ledger.begin()
        forward_and_update(trainer, module.device, tracker)
    return tracker
