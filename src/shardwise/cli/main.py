"""The command line. Exit codes: 0 done, 1 the answer is no, 2 the input is wrong, 3 it broke, 4 stopped early."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise import __version__
from shardwise.cli.overrides import Overrides, split_overrides
from shardwise.spec import InputError

_RUN_FIELDS = "Any field of the Run can be set: --recipe.steps 40 --layout.dp_shard 2 (docs/run-file.md)."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
data = typer.Typer(no_args_is_help=True, help="Token shards.")
app.add_typer(data, name="data")

_overrides: Overrides = []  # what stood on the command line for the Run


def main(words: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if words is None else words
    try:
        rest, _overrides[:] = split_overrides(words)
        app(rest, prog_name="shardwise")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _verb(function: Callable[..., int]) -> Callable[..., None]:
    """Turn a verb's mistakes and exit code into the process's."""

    @functools.wraps(function)
    def command(*arguments: Any, **options: Any) -> None:
        try:
            code = function(*arguments, **options)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 3
        except Exception:
            import traceback

            traceback.print_exc()
            code = 3
        raise typer.Exit(code)

    return command


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Pick the layout of a pre-training run, train it, and measure what happened."""
    if version:
        print(__version__)
        raise typer.Exit


@app.command(epilog=_RUN_FIELDS)
@_verb
def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The Run to train, or to continue.")],
    out: Annotated[Path | None, typer.Option(help="Where results go. Default: runs/ and the file's name.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine. Default: what the Run asks for.")] = None,
    log: Annotated[list[str] | None, typer.Option(help="Also send metrics to: tensorboard. Repeatable.")] = None,
) -> int:
    """Train. The same command with the same --out continues where it stopped."""
    from shardwise.report.loggers import require_loggers
    from shardwise.spec import load_run

    out = out or Path("runs") / run.stem
    log_names = tuple(log or ())
    if "RANK" in os.environ:  # started by our launcher, torchrun or Slurm: this is one rank
        from shardwise.launching import run_worker

        overrides = list(_overrides)

        def rank() -> int:
            require_loggers(log_names)
            loaded = load_run(run, overrides)
            from shardwise.verbs.worker import train_rank

            return train_rank(loaded, out, log_names)

        return run_worker(rank)

    import shardwise
    from shardwise.launching import hold_stop_signals

    hold_stop_signals()  # a stop that comes before the ranks do is acted on by the launcher
    require_loggers(log_names)
    command = shlex.join(["shardwise", *sys.argv[1:]])
    return shardwise.train(
        load_run(run, _overrides), out=out, nproc=nproc, log=log_names, how_to_continue=f"continue with: {command}"
    )


@app.command()
@_verb
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


@data.command("prepare")
@_verb
def data_prepare(
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
