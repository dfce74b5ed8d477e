"""From a module on the meta device to weights: each rank fills its own part, one full parameter at a time."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.model.init import initial_value
from shardwise.spec import Model


@torch.no_grad()
def materialize(module: nn.Module, model: Model, seed: int, device: torch.device) -> None:
    """Allocate the parameters that this rank holds and set them to their initial values.

    Nothing is communicated: every rank draws the same full tensor and keeps its own part of it.
    """
    module.to_empty(device=device)
    for name, parameter in module.named_parameters():
        _fill(parameter, name, model, seed, device)


def _fill(parameter: nn.Parameter, name: str, model: Model, seed: int, device: torch.device) -> None:
    # A function of its own, so that the full tensor is gone before the next one is drawn.
    full = initial_value(model, name, parameter.shape, seed, device).to(parameter.dtype)
    if isinstance(parameter, DTensor):
        # src_data_rank=None: cut the local tensor instead of scattering rank 0's.
        part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(full)
