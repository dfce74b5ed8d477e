"""A model small enough to save hundreds of times: odd sizes, so that shards are uneven or empty, and a tied head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoints.save import Checkpointer
from shardwise.checkpoints.state import collect, flatten

FIELDS = {"run": {"recipe": {"steps": 3}}, "data": "abc"}


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(ids)))


def build(wrapper: str, optimizer: str = "adamw", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`wrapper` is plain, ddp or fsdp; the last two are over all ranks."""
    torch.manual_seed(seed)
    model: nn.Module = Tiny()
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    if wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {
        "adamw": {"lr": 0.01},
        "fused": {"lr": 0.01, "fused": True},
        "sgd": {"lr": 0.1},
        "momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    }[optimizer]
    kind = torch.optim.AdamW if optimizer in ("adamw", "fused") else torch.optim.SGD
    return model, kind(model.parameters(), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Every rank sees the same batch, so that all layouts learn the same."""
    for step in range(first, first + steps):
        ids = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(state: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Weights and moments, gathered, as dtype, shape and bytes. Collective where the state is sharded."""
    found = {}
    for key, tensor in flatten(state).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not key.startswith("rng/"):
            found[key] = (str(full.dtype), tuple(full.shape), full.detach().numpy().tobytes())
    return found


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return bits(collect(model, optimizer))


def checkpointer(directory: Path, said: list[str], **changes: Any) -> Checkpointer:
    return Checkpointer(
        directory, **{"keep": 10, "asynchronous": False, "say": said.append, "timeout": 60.0, **changes}
    )


def save(directory: Path, step: int, state: Mapping[str, Any], **changes: Any) -> None:
    """One save that must succeed."""
    said: list[str] = []
    saver = checkpointer(directory, said, **changes)
    saver.save(step, state, tokens=step * 100, **FIELDS)
    saver.close()
    assert saver.last_error is None, said
