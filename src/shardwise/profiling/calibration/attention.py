"""Causal attention: every kernel that this device has, forward and backward, by length and head size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.profiling.calibration.clock import Clock, backward_of
from shardwise.profiling.calibration.products import tflops
from shardwise.spec.calibration import AttentionRate

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_HEADS = ((64, 64, 1), (64, 64, 4), (128, 128, 1), (128, 128, 4), (192, 128, 1))  # query, value, queries per key
_CPU_HEADS = ((32, 32, 1), (64, 64, 1), (64, 64, 2))
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_CPU_LENGTHS = (64, 128, 256, 512, 1024)
_TOKENS, _CPU_TOKENS = 16384, 1024  # of one call, unless the sequence is longer


def measure_attention(clock: Clock, dtype: str, torch_dtype: torch.dtype, *, quick: bool) -> Iterator[AttentionRate]:
    """One AttentionRate for each kernel and head size that works here."""
    cpu = clock.device.type == "cpu"
    lengths, tokens, heads = (_CPU_LENGTHS, _CPU_TOKENS, 4) if cpu else (_LENGTHS, _TOKENS, 16)
    lengths = lengths[:-1:2] if quick else lengths
    for backend in ("cpu",) if cpu else tuple(_BACKENDS):
        for query, value, share in (_CPU_HEADS if cpu else _HEADS)[:: 2 if quick else 1]:
            done, forward, backward = [], [], []
            for length in lengths:
                batch = max(1, tokens // length)
                shapes = ((heads, query), (heads // share, query), (heads // share, value))
                # As the trainer has them: heads inside, (B, S, H, d) transposed.
                q, k, v = (
                    torch.randn(batch, length, count, size, device=clock.device, dtype=torch_dtype)
                    .transpose(1, 2)
                    .requires_grad_()
                    for count, size in shapes
                )
                flops = 2 * batch * heads * length * (length + 1) / 2 * (query + value)

                def attend(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, grouped: bool = share > 1):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

                try:
                    with _only(backend):
                        once, again = clock.seconds(attend, keeps=True), clock.seconds(backward_of(attend(), [q, k, v]))
                except RuntimeError:  # this kernel does not take these shapes, or they do not fit
                    break
                done.append(length)
                forward.append(tflops(flops, once))
                backward.append(tflops(2.5 * flops, again))
            if done:
                yield AttentionRate.load(
                    {
                        "dtype": dtype,
                        "backend": backend,
                        "head_dim": query,
                        "value_dim": value,
                        "queries_per_key": share,
                        "lengths": done,
                        "forward": forward,
                        "backward": backward,
                    }
                )


def _only(backend: str) -> AbstractContextManager[None]:
    return sdpa_kernel([_BACKENDS[backend]]) if backend in _BACKENDS else nullcontext()
