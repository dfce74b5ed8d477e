"""The operators that torch picks on CUDA, on the CPU's fake tensors; none of them computes anything there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from shardwise.parallel import attention as parallel_attention


class _FusedNorm(torch.autograd.Function):
    """What `aten::_fused_rms_norm` saves and allocates on CUDA; on a CPU torch decomposes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    if torch.compiler.is_compiling():  # Inductor takes it apart
        return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]
    return _FusedNorm.apply(x, weight)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, scale: float | None = None, **_: Any
) -> torch.Tensor:
    if q.shape[-1] == v.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    # Latent attention: keys wider than values. cuDNN takes them as they are.
    compute = torch.ops.aten._scaled_dot_product_cudnn_attention
    return compute(q, k, v, None, True, 0.0, is_causal, False, scale=scale)[0]


@contextlib.contextmanager
def cuda_operators() -> Iterator[None]:
    """Flash attention (also where context parallelism asks whether it works), and RMSNorm in one kernel."""

    def flash_works(q: torch.Tensor, v: torch.Tensor) -> bool:
        return q.dtype in (torch.bfloat16, torch.float16) and max(q.shape[-1], v.shape[-1]) <= 256

    with (
        mock.patch.object(F, "rms_norm", _rms_norm),
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(parallel_attention, "_flash_works", flash_works),
    ):
        yield
