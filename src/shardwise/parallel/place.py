"""Parameters of a module as DTensors."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor


def place(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Spread the module's own parameters of these names over a mesh of one dimension, without communication; names
    that it does not have are passed over."""
    for name, placement in placements.items():
        parameter = getattr(module, name, None)
        if parameter is not None:
            spread = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def unplaced(module: nn.Module) -> list[str]:
    """The names of its own parameters that are plain tensors."""
    return [name for name, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)]


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether expert parallelism has spread it, which has a mesh of its own."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def become(module: nn.Module, kind: type[nn.Module], **fields: Any) -> None:
    """Keep the parameters and their names, change what the module computes."""
    module.__class__ = kind
    for name, value in fields.items():
        setattr(module, name, value)
