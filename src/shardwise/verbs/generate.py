"""`generate`: sample text from a checkpoint on one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.data import Tokenizer
from shardwise.spec import Run
from shardwise.verbs.saved import tokenizer_of, usable_checkpoint


def generate(
    run_dir: str | Path,
    *,
    prompt: str = "\n",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[str]:
    """The text that follows `prompt`, piece by piece, sampled from the newest complete checkpoint of a run.

    Any layout's checkpoint works; the whole model must fit on one device. Raises InputError.
    """
    checkpoint, run = usable_checkpoint(run_dir)
    tokenizer = tokenizer_of(checkpoint, run)
    ids = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end_of_document]
    sampled = _sample(run, checkpoint, ids, tokens, tokenizer.vocabulary, temperature, top_k, seed)
    return _decode(sampled, tokenizer)


def _sample(
    run: Run,
    checkpoint: Path,
    prompt: list[int],
    tokens: int,
    vocabulary: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    import torch

    from shardwise.model.generate import generate

    decoder = _load(run, checkpoint)
    ids = torch.tensor(prompt, device=next(decoder.parameters()).device)
    return generate(decoder, ids, tokens, temperature=temperature, top_k=top_k, seed=seed, vocabulary=vocabulary)


def _load(run: Run, checkpoint: Path) -> Any:
    """The whole model on this machine's first device."""
    import torch

    from shardwise.checkpoints.restore import restore
    from shardwise.model.decoder import Decoder
    from shardwise.parallel.precision import compute_dtype, parameter_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = run.recipe.precision
    with torch.device("meta"):
        decoder = Decoder(run.model, compute_dtype(precision)).to(parameter_dtype(precision))
    decoder = decoder.to_empty(device=device).eval()
    restore(checkpoint, {"model": decoder.state_dict()})
    return decoder


def _decode(ids: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Text as soon as it is whole: a character may be spread over several tokens."""
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if text and not text.endswith("\ufffd"):
            yield text
            waiting = []
    if waiting:
        yield tokenizer.decode(waiting)
