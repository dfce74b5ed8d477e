"""Rotary frequencies, plain or scaled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.spec import Model


def rotary_table(model: Model, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (S, head_dim / 2), for integer positions (S,), in promote_types(dtype, float32)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, model.head_dim, 2, device=positions.device, dtype=wide) / model.head_dim
    frequencies = 1.0 / model.rope_theta**exponents
    if model.rope_scaling:
        frequencies = _scale_llama3(model, frequencies)
    angles = positions.to(wide)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _scale_llama3(model: Model, frequencies: Tensor) -> Tensor:
    """Llama-3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    scaling = model.rope_scaling
    assert scaling is not None
    turns = scaling.original_sequence * frequencies / (2 * math.pi)  # rotations within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
