"""`shardwise data …`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.verb import verb

if TYPE_CHECKING:
    from shardwise.data import DataIndex, Progress

app = typer.Typer(no_args_is_help=True)


@app.command()
@verb
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Text, .jsonl or .parquet files (text and JSON lines also as .gz or .zst), directories of them, "
            "patterns, or hf:NAME[:CONFIG][@SPLIT].",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The directory to write.")],
    tokenizer: Annotated[
        str, typer.Option(help="`bytes`, an encoding of tiktoken such as gpt2, or a tokenizer.json.")
    ] = "bytes",
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text; a.b for nested ones.")] = "text",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out broken lines, rows and files.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: as many as CPUs.")] = None,
    validation_fraction: Annotated[float, typer.Option(help="Share of documents held out for validation.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one shard file.")] = 100_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> int:
    """Turn text into memory-mapped token shards, which `recipe.data` then names.

    When it is interrupted, the same command continues.
    """
    import shardwise
    from shardwise.data import WorkerDied
    from shardwise.report.progress import LiveLine

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with LiveLine(sys.stderr if as_json else sys.stdout, total=None, plain_seconds=5.0) as display:
            index = shardwise.prepare_data(
                sources,
                out,
                tokenizer=tokenizer,
                text_field=text_field,
                skip_bad=skip_bad,
                validation_fraction=validation_fraction,
                shard_tokens=shard_tokens,
                workers=workers,
                say=display.say,
                progress=lambda now: display.show(_line(now), done=now.done, total=now.total),
            )
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 4
    except WorkerDied as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    if as_json:
        print(json.dumps({"out": str(out), "fingerprint": index.fingerprint, **index.dump()}))
    else:
        print("\n".join(_table(index)))
    return 0


def _table(index: DataIndex) -> list[str]:
    """What was written, a line for each split."""
    rows = [("split", "files", "documents", "tokens", "bytes", "sha256")]
    for name, split in (("train", index.train), ("validation", index.validation)):
        numbers = (len(split.files), split.documents, split.tokens, split.bytes)
        rows.append((name, *(f"{number:,}" for number in numbers), split.sha256[:12]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _line(progress: Progress) -> str:
    """'reading 1.2 of 4.8 GB  310,000 documents  25.1 MB/s  0:02:24 left'."""
    parts = [f"{progress.stage} {_amount(progress.done, progress.unit)} of {_amount(progress.total, progress.unit)}"]
    if progress.documents:
        parts.append(f"{progress.documents:,} documents")
    if progress.per_second is not None:
        parts.append(f"{_amount(progress.per_second, progress.unit)}/s")
    if progress.seconds_left is not None:
        minutes, seconds = divmod(round(progress.seconds_left), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
    return "  ".join(parts)


def _amount(number: float, unit: str) -> str:
    from shardwise.spec.numbers import human

    return human(number) + unit if unit == "B" else f"{human(number)} {unit}"
