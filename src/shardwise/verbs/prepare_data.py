"""`data prepare`: text becomes token shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.data import DataIndex, prepare


def prepare_data(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str = "bytes",
    validation_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    progress: Callable[[str], None] | None = None,
) -> DataIndex:
    """Tokenize a text file or a tree of them into the directory `out`, which `recipe.data` then names.

    tokenizer: `bytes`, or the path of a Hugging Face tokenizer.json. Raises InputError.
    """
    return prepare(
        Path(source),
        Path(out),
        tokenizer,
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        progress=progress,
    )
