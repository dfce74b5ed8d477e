"""One block of the decoder."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.model.cache import LayerCache
from shardwise.model.experts import MoE
from shardwise.model.latent import LatentAttention
from shardwise.model.layers import Attention, Mlp, Norm
from shardwise.spec import Model


class Block(nn.Module):
    """Pre-norm residual block; `index` is its place among the model's layers."""

    def __init__(self, model: Model, index: int):
        super().__init__()
        norm = (model.norm, model.hidden, model.norm_eps, model.norm_bias)
        self.attention_norm = Norm(*norm)
        self.attention = LatentAttention(model) if model.latent else Attention(model)
        self.mlp_norm = Norm(*norm)
        routed = model.experts is not None and index >= model.experts.dense_layers
        self.mlp = MoE(model) if routed else Mlp(model)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, cache)
        return x + self.mlp(self.mlp_norm(x))
