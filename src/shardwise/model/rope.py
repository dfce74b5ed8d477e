"""Rotary frequencies, plain or scaled. In fp32 they are bit-equal to transformers' (`modeling_rope_utils.py`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.spec import Model
from shardwise.spec.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, YarnScaling


def rotary_table(model: Model, positions: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (S, rotary_dim / 2), for integer positions (S,), in promote_types(dtype, float32).

    length: positions of the whole sequence, of which `positions` may be a part; some scalings depend on it.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions.to(wide)[:, None] * rotary_frequencies(model, length, wide, positions.device)
    magnitude = model.rope_scaling.magnitude if isinstance(model.rope_scaling, YarnScaling | LongScaling) else 1.0
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotary_frequencies(model: Model, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians per position, (rotary_dim / 2,), for a sequence of `length` tokens."""
    size, base, scaling = model.rotary_dim, model.rope_theta, model.rope_scaling
    exponents = torch.arange(0, size, 2, device=device, dtype=dtype) / size
    match scaling:
        case LinearScaling():
            return 1.0 / base**exponents / scaling.factor
        case DynamicScaling():
            longer = scaling.factor * max(length, model.max_sequence) / model.max_sequence - (scaling.factor - 1)
            return 1.0 / (base * longer ** (size / (size - 2))) ** exponents
        case YarnScaling():
            return _yarn(scaling, base, size, base**exponents)
        case LongScaling():
            factors = scaling.long_factors if length > scaling.original_sequence else scaling.short_factors
            return 1.0 / (torch.tensor(factors, device=device, dtype=dtype) * base**exponents)
        case Llama3Scaling():
            return _llama3(scaling, 1.0 / base**exponents)
    return 1.0 / base**exponents


def frequencies_change(model: Model, length: int) -> bool:
    """Whether a sequence of `length` tokens has other frequencies than one of length - 1."""
    match model.rope_scaling:
        case DynamicScaling():
            return length > model.max_sequence
        case LongScaling():
            return length == model.rope_scaling.original_sequence + 1
    return False


def _yarn(scaling: YarnScaling, base: float, size: int, periods: Tensor) -> Tensor:
    """arXiv 2309.00071, section 3.2: kept and divided frequencies, blended along a ramp over the dimensions."""

    def dimension(turns: float) -> float:
        """Which dimension turns this often within the original context."""
        return size * math.log(scaling.original_sequence / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = torch.arange(size // 2, device=periods.device, dtype=periods.dtype)
    kept = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _llama3(scaling: Llama3Scaling, frequencies: Tensor) -> Tensor:
    """Meta's Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    original, wavelengths = scaling.original_sequence, 2 * math.pi / frequencies
    kept = (original / wavelengths - low) / (high - low)
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, scaled)
