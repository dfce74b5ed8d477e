"""`shardwise generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.verb import verb
from shardwise.spec import InputError


@verb
def generate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="What `train` wrote with --out.")],
    prompt: Annotated[str | None, typer.Option(help="Text to go on from. Default: a line break.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file that holds it; `-` is the standard input.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to sample.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the K likeliest; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> int:
    """Sample text from a run's newest checkpoint, whatever layout it was trained on, on one device."""
    import shardwise

    if prompt_file is not None:
        if prompt is not None:
            raise InputError("--prompt and --prompt-file are both given; one is expected")
        prompt = _read(prompt_file)
    prompt = "\n" if prompt is None else prompt
    pieces = shardwise.generate(run_dir, prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    print(prompt, end="")
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompt-file {path}: cannot be read: {error}") from None
