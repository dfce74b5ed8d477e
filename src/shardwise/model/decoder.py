"""Decoder: token ids in, logits or the loss out; or one stage of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.model.block import Block
from shardwise.model.cache import Cache
from shardwise.model.layers import Norm
from shardwise.model.loss import Head
from shardwise.model.rope import rotary_table
from shardwise.spec import Model


class Decoder(nn.Module):
    """The whole model, or with `layers` a stage of it: those blocks, the embedding where the first layer is among them,
    the head where the last one is. Parameters have the same names either way.

    Build it under `torch.device("meta")` and fill it with `initial_value`. `compute_dtype` is the type of the
    activations; weights may be wider.
    """

    def __init__(self, model: Model, compute_dtype: torch.dtype = torch.float32, layers: range | None = None):
        super().__init__()
        layers = range(model.layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == model.layers
        self.model, self.compute_dtype = model, compute_dtype
        self.embedding = nn.Embedding(model.vocabulary, model.hidden) if first or (last and model.tied) else None
        learned = first and model.positions == "learned"
        self.positions = nn.Embedding(model.max_sequence, model.hidden) if learned else None
        self.blocks = nn.ModuleDict({str(index): Block(model, index) for index in layers})
        self.norm = Norm(model.norm, model.hidden, model.norm_eps, model.norm_bias) if last else None
        self.head = Head(model) if last else None
        self.first = first

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        length: int | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Ids (B, S) -> logits (B, S, vocabulary) in the compute type; with labels (B, S), their summed loss instead.

        A stage without the embedding takes (B, S, hidden), one without the head returns it. positions (S,), of the
        whole sequence of `length`: those of the ids where these are only a part of it. With a cache, the ids follow
        those that it has seen: all of a text at first, then one at a time.
        """
        if positions is None:
            start = cache.length if cache else 0
            positions = torch.arange(start, start + x.shape[1], device=x.device)
            length = start + x.shape[1]
        if self.first:
            x = self.embedding(x).to(self.compute_dtype)
            if self.positions is not None:
                x = x + self.positions(positions).to(self.compute_dtype)
        rope = None
        if self.model.positions == "rope":
            rope = rotary_table(self.model, positions, length or len(positions), self.compute_dtype)
        x = self.run_blocks(x, rope, cache)
        if self.head is None or self.norm is None:
            return x
        return self.head(self.norm(x), labels, self.embedding.weight if self.model.tied else None)

    def run_blocks(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: Cache | None = None) -> Tensor:
        """(B, S, hidden) -> (B, S, hidden) through all blocks."""
        for index, block in enumerate(self.blocks.values()):
            x = block(x, rope, cache.layers[index] if cache else None)
        return x
