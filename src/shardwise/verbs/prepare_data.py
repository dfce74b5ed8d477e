"""`data prepare`: text becomes token shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardwise.data import DataIndex, Progress, prepare


def prepare_data(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    text_field: str = "text",
    skip_bad: bool = False,
    validation_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    say: Callable[[str], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> DataIndex:
    """Tokenize text, JSON lines, Parquet or Hugging Face data sets into the directory `out`, which `recipe.data` then
    names; docs/data.md says what is read how.

    tokenizer: `bytes`, an encoding of tiktoken such as `gpt2`, or the path of a Hugging Face tokenizer.json.
    text_field: the field of a JSON line, or the column of a table, that holds the text. skip_bad: leave out lines, rows
    and files that are broken, and count them. workers: processes; as many as there are CPUs by default.

    The result does not depend on `workers`. What an interruption or an error leaves is continued by the same call.
    Raises InputError.
    """
    return prepare(
        sources,
        out,
        tokenizer,
        text_field=text_field,
        skip_bad=skip_bad,
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        workers=workers,
        say=say,
        progress=progress,
    )
