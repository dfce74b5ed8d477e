"""The layers of the decoder. Each casts its weights to the type of what flows through it.

So master weights may stay fp32 while activations are bf16, with or without FSDP2 (whose gathered weights are bf16
already, which makes the cast a no-op): the arithmetic is the same on every layout, unlike under autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.model.cache import LayerCache
from shardwise.spec import Model


class Linear(nn.Linear):
    """y = x Wᵀ + b in the type of x. (…, in) -> (…, out)."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension. Torch's kernels take their statistics in at least fp32."""

    def __init__(self, kind: str, size: int, eps: float, bias: bool):
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight, shape = self.weight.to(x.dtype), self.weight.shape
        if self.kind == "rmsnorm":
            return F.rms_norm(x, shape, weight, self.eps)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention with grouped queries.

    `qkv` is one projection whose rows are ordered by KV group (the group's queries, its key, its value), so that
    cutting the rows in equal parts keeps whole groups together.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.head_dim, self.queries_per_group = model.head_dim, model.heads // model.kv_heads
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim
        self.qkv = Linear(model.hidden, rows, bias=model.qkv_bias)
        self.out = Linear(model.heads * model.head_dim, model.hidden, bias=model.out_bias)
        self.q_norm = Norm("rmsnorm", model.head_dim, model.norm_eps, False) if model.qk_norm else None
        self.k_norm = Norm("rmsnorm", model.head_dim, model.norm_eps, False) if model.qk_norm else None

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
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=sequence > 1,  # one token alone, or after those in the cache, sees all keys
            enable_gqa=self.queries_per_group > 1,
        )  # (B, H, S, d)
        return self.out(mixed.transpose(1, 2).flatten(2))


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


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, model: Model):
        super().__init__()
        norm = (model.norm, model.hidden, model.norm_eps, model.norm_bias)
        self.attention_norm, self.attention = Norm(*norm), Attention(model)
        self.mlp_norm, self.mlp = Norm(*norm), Mlp(model)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, cache)
        return x + self.mlp(self.mlp_norm(x))
