"""From a module on the meta device to weights: each rank fills its own part, one full parameter at a time."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.model.init import initial_value
from shardwise.spec import Model


@torch.no_grad()
def materialize(
    module: nn.Module, model: Model, seed: int, device: torch.device, home: torch.device | None = None
) -> None:
    """Allocate the parameters that this rank holds, on `home` (default: the device), and set them to their initial
    values.

    Nothing is communicated: every rank draws the same full tensor and keeps its own part of it.
    """
    module.to_empty(device=home or device)
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(device))
    for name, parameter in module.named_parameters():
        _fill(parameter, name, model, seed, device)
    for buffer in module.buffers():
        buffer.zero_()  # the balancing biases of routers, and what they count


def _fill(parameter: nn.Parameter, name: str, model: Model, seed: int, device: torch.device) -> None:
    # A function of its own, so that the full tensor is gone before the next one is drawn.
    full = initial_value(model, name, parameter.shape, seed, device).to(parameter.dtype)
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(own_part(full, parameter))
    else:
        parameter.copy_(full)


def own_part(full: torch.Tensor, spread: DTensor) -> torch.Tensor:
    """What this rank holds of a full tensor that is spread as `spread` is. Nothing is communicated.

    FSDP2 cuts what tensor parallelism has cut, though its dimension of the mesh comes first: hence the order.
    """
    place = spread.device_mesh.get_coordinate()
    assert place is not None
    for dimension, placement in reversed(list(enumerate(spread.placements))):
        if not placement.is_replicate():
            parts = full.chunk(spread.device_mesh.size(dimension), placement.dim)
            index = place[dimension]
            full = parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)
    return full
