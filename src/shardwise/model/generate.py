"""Sampling from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    forward: Callable[[Tensor], Tensor],
    prompt: Tensor,
    tokens: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield `tokens` sampled ids after `prompt` (S,).

    forward: ids (1, S) -> logits (1, S, V). It sees at most the last `context` ids. temperature 0 takes the likeliest.
    Ids of `vocabulary` and beyond (rows that only pad the table) are never drawn.
    """
    generator = torch.Generator(prompt.device).manual_seed(seed)
    ids = prompt
    for _ in range(tokens):
        logits = forward(ids[None, -context:])[0, -1, :vocabulary].float()
        if temperature == 0:
            chosen = logits.argmax(keepdim=True)
        else:
            if top_k:
                logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat((ids, chosen))
        yield int(chosen)
