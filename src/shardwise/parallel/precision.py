"""Precision names as torch dtypes."""

from __future__ import annotations

import torch

from shardwise.spec import Precision

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: Precision) -> torch.dtype:
    return DTYPES[precision.compute]


def parameter_dtype(precision: Precision) -> torch.dtype:
    return DTYPES[precision.parameters]


def reduce_dtype(precision: Precision) -> torch.dtype:
    return DTYPES[precision.reduce]
