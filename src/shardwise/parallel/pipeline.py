"""Pipeline parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.parallel.mesh import Mesh
from shardwise.spec import Layout


class Pipeline:
    def __init__(self, layout: Layout, mesh: Mesh, stages: dict[int, nn.Module], sequence: int, device: torch.device):
        raise NotImplementedError

    def accumulate(self, micro_batches: list[tuple[Tensor, Tensor]], factor: float) -> Tensor:
        raise NotImplementedError

    def losses(self, micro_batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        raise NotImplementedError
