"""This process: its rank, its device, its process group. One group lifetime per process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Process:
    rank: int
    world: int
    local_rank: int
    device: torch.device


@contextmanager
def process_group(device_type: str, timeout_seconds: float = 1800) -> Iterator[Process]:
    """Join the job that torchrun or our launcher describes in the environment; leave it at the end."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if device_type == "cuda":
        # Read when the allocator starts. Without it, reserved memory was seen at up to twice the live peak.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device_type == "cuda" else None,
    )
    try:
        yield Process(dist.get_rank(), dist.get_world_size(), local_rank, device)
    finally:
        dist.destroy_process_group()
