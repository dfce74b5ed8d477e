"""Multi-head latent attention (arXiv 2405.04434, section 2.1), as in DeepSeek-V3."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shardwise.model.cache import LayerCache
from shardwise.model.layers import Attend, Linear, Norm, causal_attention, rotate
from shardwise.spec import Model
from shardwise.spec.rope import YarnScaling

_NORM_EPS = 1e-6  # DeepSeek's code leaves the norms of the latents at this, whatever the model's own is


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values, and queries, come from narrow latents.

    Rows of `q_b` (or `q`, where queries have no latent) are ordered by head: its part without positions, then the
    rotated one; those of `kv_b` by head: its key without positions, then its value. The rotated part of the key is the
    last of `kv_a`, the same for all heads. RoPE is in the half-split form: DeepSeek's interleaved rows are sorted where
    weights are imported. The cache holds whole keys and values.
    """

    def __init__(self, model: Model):
        super().__init__()
        latent = model.latent
        assert latent is not None
        self.kv_rank, self.nope_dim, self.rope_dim = latent.kv_rank, latent.nope_dim, latent.rope_dim
        self.value_dim = latent.value_dim
        query_rows = model.heads * (latent.nope_dim + latent.rope_dim)
        self.q = self.q_a = self.q_norm = self.q_b = None
        if latent.query_rank:
            self.q_a = Linear(model.hidden, latent.query_rank, bias=False)
            self.q_norm = Norm("rmsnorm", latent.query_rank, _NORM_EPS, False)
            self.q_b = Linear(latent.query_rank, query_rows, bias=False)
        else:
            self.q = Linear(model.hidden, query_rows, bias=False)
        self.kv_a = Linear(model.hidden, latent.kv_rank + latent.rope_dim, bias=False)
        self.kv_norm = Norm("rmsnorm", latent.kv_rank, _NORM_EPS, False)
        self.kv_b = Linear(latent.kv_rank, model.heads * (latent.nope_dim + latent.value_dim), bias=False)
        self.out = Linear(model.heads * latent.value_dim, model.hidden, bias=model.out_bias)
        factor = model.rope_scaling.score_factor if isinstance(model.rope_scaling, YarnScaling) else 1.0
        self.scale = factor / math.sqrt(latent.nope_dim + latent.rope_dim)
        self.attend: Attend = causal_attention

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: LayerCache | None = None) -> Tensor:
        q = self._queries(x).unflatten(-1, (-1, self.nope_dim + self.rope_dim))  # (B, S, H, n + r)
        latent, shared = self.kv_a(x).split([self.kv_rank, self.rope_dim], dim=-1)
        shared = shared[:, :, None]  # (B, S, 1, r)
        kv = self.kv_b(self.kv_norm(latent)).unflatten(-1, (-1, self.nope_dim + self.value_dim))
        nope, v = kv.split([self.nope_dim, self.value_dim], dim=-1)  # (B, S, H, n), (B, S, H, e)
        if rope is not None:
            plain, turned = q.split([self.nope_dim, self.rope_dim], dim=-1)
            q, shared = torch.cat((plain, rotate(turned, *rope)), dim=-1), rotate(shared, *rope)
        k = torch.cat((nope, shared.expand(-1, -1, nope.shape[2], -1)), dim=-1)
        if cache is not None:
            k, v = cache.extend(k, v)
        mixed = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=self.scale)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _queries(self, x: Tensor) -> Tensor:
        if self.q is not None:
            return self.q(x)
        assert self.q_a is not None and self.q_norm is not None and self.q_b is not None
        return self.q_b(self.q_norm(self.q_a(x)))
