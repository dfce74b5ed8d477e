"""Initial weights: a pure function of (seed, parameter name), so that every layout starts from the same ones."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from shardwise.spec import Model

_STD = 0.02  # GPT-2
# What adds to the residual stream.
_RESIDUAL = ("attention.out.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")


def initial_value(model: Model, name: str, shape: torch.Size, seed: int, device: torch.device | str) -> Tensor:
    """The full fp32 tensor of one parameter.

    Matrices, also those of all experts in one tensor: N(0, 0.02²), those that write into the residual stream scaled
    by 1/√(2 · layers) (GPT-2); norm weights 1, biases 0. The draw depends on the kind of device (CPU and CUDA
    generators differ), not on the layout.
    """
    if len(shape) == 1:
        return torch.zeros(shape, device=device) if name.endswith("bias") else torch.ones(shape, device=device)
    std = _STD / math.sqrt(2 * model.layers) if name.endswith(_RESIDUAL) else _STD
    generator = torch.Generator(device).manual_seed(_key(seed, name))
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
