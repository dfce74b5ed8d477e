"""torch.compile, block by block.

Each block is one graph, which all blocks of a kind share; what is recomputed is inside it, the hooks of FSDP2 are
around it. Names of modules and parameters stay. The first step waits for the compiler, which sees this rank's parts of
the weights alone, whatever they are parts of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.model.decoder import Decoder
from shardwise.model.layers import own_part
from shardwise.parallel.compat import enable_async_tp
from shardwise.parallel.mesh import Mesh
from shardwise.spec import Layout

BACKEND = "inductor"


def compile_blocks(decoder: Decoder, mesh: Mesh, layout: Layout) -> None:
    """Compile every block of a decoder, or of a stage of it, in place.

    With async_tp, inductor cuts the products beside tensor-parallel collectives into pieces that overlap with theirs
    (CUDA only).
    """
    torch._dynamo.config.optimize_ddp = False  # which cuts what it compiles where DDP's buckets end
    if layout.async_tp:
        enable_async_tp(mesh.weights.get_group("tp"))
    for block in decoder.blocks.values():
        block.forward = _on_own_parts(block, torch.compile(block.forward, backend=BACKEND, fullgraph=True))


def _on_own_parts(block: nn.Module, forward: Any) -> Any:
    def run(*arguments: Any) -> Tensor:
        spread = [
            (module._parameters, name, parameter)
            for module in block.modules()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        for parameters, name, parameter in spread:
            parameters[name] = own_part(parameter)
        try:
            return forward(*arguments)
        finally:
            for parameters, name, parameter in spread:
                parameters[name] = parameter

    return run
