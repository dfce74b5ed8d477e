"""Sampling from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.model.cache import Cache
from shardwise.model.decoder import Decoder
from shardwise.model.rope import frequencies_change


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompt: Tensor,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield `tokens` sampled ids after `prompt` (S,). temperature 0 takes the likeliest.

    Each token costs one position. Once the text is longer than the model's context, it sees the last `context` ids, at
    new positions for each token, so each costs all of them. Ids of `vocabulary` and beyond (rows that only pad the
    table) are never drawn.
    """
    model = decoder.model
    context = min(model.max_sequence, model.sliding_window or model.max_sequence)
    capacity = min(context, len(prompt) + tokens)
    generator = torch.Generator(prompt.device).manual_seed(seed)
    ids = prompt
    cache: Cache | None = None
    for _ in range(tokens):
        if cache is None or len(ids) > context or frequencies_change(model, len(ids)):
            cache, new = Cache(model.layers, capacity), ids[-context:]
        else:
            new = ids[-1:]
        logits = decoder(new[None], cache=cache)[0, -1, :vocabulary].float()
        chosen = _choose(logits, temperature, top_k, generator)
        ids = torch.cat((ids, chosen))
        yield int(chosen)


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One id (1,), from the `top_k` likeliest where it is given."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    if top_k:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
