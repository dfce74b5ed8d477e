"""`shardwise data …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb

app = typer.Typer(no_args_is_help=True)


@app.command()
@verb
def prepare(
    source: Annotated[Path, typer.Argument(help="A text file, or a directory of them.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The directory to write.")],
    tokenizer: Annotated[str, typer.Option(help="`bytes`, or a tokenizer.json.")] = "bytes",
    validation_fraction: Annotated[float, typer.Option(help="Share of documents held out for validation.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one shard file.")] = 100_000_000,
) -> int:
    """Turn text into memory-mapped token shards, which `recipe.data` then names."""
    import shardwise

    shardwise.prepare_data(
        source,
        out,
        tokenizer=tokenizer,
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        progress=print,
    )
    return 0
