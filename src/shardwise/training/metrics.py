"""What a step costs and how well it uses the chip; and metrics.jsonl."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import torch

from shardwise.planner.flops import model_flops_per_token, recomputed_flops_per_token
from shardwise.planner.recompute import recompute_of
from shardwise.spec import Run
from shardwise.spec.presets import gpu_called


class Utilisation:
    """MFU and HFU of this machine's chip; None where its peak is not known."""

    def __init__(self, run: Run, device: torch.device):
        chip = gpu_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        peak = chip.peak_flops(run.recipe.precision.compute) if chip else None
        self._peak_of_all = peak * run.fixed_layout.world if peak else None
        sequence = run.recipe.sequence
        self._causal = model_flops_per_token(run.model, sequence)
        self._full = model_flops_per_token(run.model, sequence, causal=False)
        self._repeated = recomputed_flops_per_token(run.model, sequence, recompute_of(run.fixed_layout.recompute))

    def of(self, tokens_per_second: float) -> dict[str, float | None]:
        """Shares of the peak. HFU counts recomputed work too."""
        if self._peak_of_all is None:
            return {"mfu": None, "mfu_full_attention": None, "hfu": None}
        share = tokens_per_second / self._peak_of_all
        return {
            "mfu": self._causal * share,
            "mfu_full_attention": self._full * share,
            "hfu": (self._causal + self._repeated) * share,
        }


def peak_memory_gib(device: torch.device) -> float:
    """Most bytes that the allocator had handed out on the device; on a CPU, most resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Journal:
    """A JSON-lines file, one flushed line a record, whose lines after a restored step are dropped.

    Raises OSError where the disk refuses.
    """

    def __init__(self, path: Path, step: int):
        """Open for appending after the lines of steps 1 … `step`."""
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= step]
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _complete_lines(path: Path) -> list[str]:
    """The lines that were written whole: a run that was killed may have left half of one."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("}\n")]
