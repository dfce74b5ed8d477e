"""Decoder: token ids in, logits out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.model.cache import Cache
from shardwise.model.layers import Block, Linear, Norm
from shardwise.model.rope import rotary_table
from shardwise.spec import Model


class Decoder(nn.Module):
    """The whole model. Build it under `torch.device("meta")` and fill it with `initial_value`.

    `compute_dtype` is the type of the activations; weights may be wider.
    """

    def __init__(self, model: Model, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.model, self.compute_dtype = model, compute_dtype
        self.embedding = nn.Embedding(model.vocabulary, model.hidden)
        learned = model.positions == "learned"
        self.positions = nn.Embedding(model.max_sequence, model.hidden) if learned else None
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = Norm(model.norm, model.hidden, model.norm_eps, model.norm_bias)
        # A tied head has no parameter of its own: one registered twice would come apart in `to_empty`.
        self.head = None if model.tied else Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """ids (B, S) -> logits (B, S, vocabulary) in the compute type.

        With a cache, the ids follow those that it has seen: all of a text at first, then one at a time.
        """
        start = cache.length if cache else 0
        length = start + ids.shape[1]
        positions = torch.arange(start, length, device=ids.device)
        x = self.embedding(ids).to(self.compute_dtype)
        if self.positions is not None:
            x = x + self.positions(positions).to(self.compute_dtype)
        rope = None
        if self.model.positions == "rope":
            rope = rotary_table(self.model, positions, length, self.compute_dtype)
        for index, block in enumerate(self.blocks):
            x = block(x, rope, cache.layers[index] if cache else None)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight.to(x.dtype)) if self.head is None else self.head(x)
