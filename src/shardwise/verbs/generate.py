"""`generate`: sample text from a checkpoint on one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.checkpoints.manifest import newest_complete
from shardwise.data import Tokenizer, open_data, resolve_data
from shardwise.spec import InputError, Model, Run


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
    directory = Path(run_dir) / "checkpoints"
    skipped: list[str] = []
    entry = newest_complete(directory, say=skipped.append)
    if entry is None or entry.checkpoint is None:
        raise InputError("\n".join([f"{directory}: holds no complete checkpoint; train first", *skipped]))
    run = Run.load(entry.checkpoint.run)
    tokenizer = open_data(resolve_data(run.recipe.data)).tokenizer
    ids = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end_of_document]
    decoder = _load(run, entry.path)
    sampling = {"temperature": temperature, "top_k": top_k, "seed": seed}
    return _decode(_sample(decoder, run.model, ids, tokens, tokenizer.vocabulary, sampling), tokenizer)


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


def _sample(
    decoder: Any, model: Model, prompt: list[int], tokens: int, vocabulary: int, sampling: dict[str, Any]
) -> Iterator[int]:
    import torch

    from shardwise.model.generate import generate

    ids = torch.tensor(prompt, device=next(decoder.parameters()).device)
    return generate(decoder, ids, tokens, context=model.max_sequence, vocabulary=vocabulary, **sampling)


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
