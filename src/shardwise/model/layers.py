"""The layers of the decoder. Each casts its weights to the type of what flows through it.

So master weights may stay fp32 while activations are bf16, with or without FSDP2 (whose gathered weights are bf16
already, which makes the cast a no-op): the arithmetic is the same on every layout, unlike under autocast.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from shardwise.model.cache import LayerCache
from shardwise.spec import Model


def cast(weight: Tensor, x: Tensor) -> Tensor:
    """A weight in the type of x. Of one that is spread over ranks (a DTensor), this rank's part; its gradient is that
    of this rank's part of x, to be summed with the other ranks' where they hold the same weight."""
    return (own_part(weight) if isinstance(weight, DTensor) else weight).to(x.dtype)


def own_part(weight: DTensor) -> Tensor:
    """This rank's part of a weight, with a gradient as `cast` says."""
    return weight.to_local(
        grad_placements=[Partial() if isinstance(place, Replicate) else place for place in weight.placements]
    )


class Linear(nn.Linear):
    """y = x Wᵀ + b in the type of x. (…, in) -> (…, out)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, cast(self.weight, x), None if self.bias is None else cast(self.bias, x))


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension. Torch's kernels take their statistics in at least fp32."""

    def __init__(self, kind: str, size: int, eps: float, bias: bool):
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = cast(self.weight, x)
        if self.kind == "rmsnorm":
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(x, weight.shape, weight, None if self.bias is None else cast(self.bias, x), self.eps)


class Attention(nn.Module):
    """Causal self-attention with grouped queries.

    `qkv` is one projection whose rows are ordered by KV group (the group's queries, its key, its value), so that
    cutting the rows in equal parts keeps whole groups together. `attend` is the attention itself, whoever computes it.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.head_dim, self.queries_per_group = model.head_dim, model.heads // model.kv_heads
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim
        self.qkv = Linear(model.hidden, rows, bias=model.qkv_bias)
        self.out = Linear(model.heads * model.head_dim, model.hidden, bias=model.out_bias)
        self.q_norm = Norm("rmsnorm", model.head_dim, model.norm_eps, False) if model.qk_norm else None
        self.k_norm = Norm("rmsnorm", model.head_dim, model.norm_eps, False) if model.qk_norm else None
        self.attend: Attend = causal_attention

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: LayerCache | None = None) -> Tensor:
        batch, sequence, _ = x.shape
        grouped = self.qkv(x).view(batch, sequence, -1, self.queries_per_group + 2, self.head_dim)  # (B, S, G, R+2, d)
        q, k, v = grouped.split([self.queries_per_group, 1, 1], dim=3)
        q, k, v = (part.flatten(2, 3) for part in (q, k, v))  # (B, S, H, d), (B, S, G, d) twice
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = cache.extend(k, v)
        mixed = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(mixed.transpose(1, 2).flatten(2))


class Attend(Protocol):
    """q (B, H, S, d), k (B, G, S, d), v (B, G, S, e) -> (B, H, S, e). H / G query heads share a key and value head.
    scale: of the scores; None: 1/√d."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor: ...


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """`Attend`, on one device."""
    causal, grouped = True, q.shape[1] != k.shape[1]
    if q.shape[2] == 1:  # one token alone, or after those in the cache, sees all keys
        causal = False
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) in the half-split form of Llama's Hugging Face weights.

    x: (B, S, heads, d); cos, sin: (S, d/2), in at least fp32, which is also what the rotation is computed in.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Mlp(nn.Module):
    """GELU (tanh form, as GPT-2) or SwiGLU (arXiv 2002.05202)."""

    def __init__(self, model: Model):
        super().__init__()
        gated = model.activation == "swiglu"
        self.gate = Linear(model.hidden, model.ffn, bias=model.mlp_bias) if gated else None
        self.up = Linear(model.hidden, model.ffn, bias=model.mlp_bias)
        self.down = Linear(model.ffn, model.hidden, bias=model.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))
