"""`shardwise generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb


@verb
def generate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="What `train` wrote with --out.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to sample.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the K likeliest; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> int:
    """Sample text from a run's newest checkpoint, whatever layout it was trained on, on one device."""
    import shardwise

    pieces = shardwise.generate(run_dir, prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    print(prompt, end="")
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
