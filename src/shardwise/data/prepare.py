"""prepare: text to token shards, once, before training.

The sources are divided into pieces. Workers turn each piece into tokens; then it is known which documents are held out,
and workers write each shard from the tokens of its pieces. What is finished lies beside the output until all of it is.
Neither the pieces nor the shards depend on who wrote them, so the result is the same, byte for byte, for any number of
workers and after any interruption. Memory does not grow with the text but for a few bytes a document.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from shardwise.data import documents
from shardwise.data.assemble import lay_out, read_splits
from shardwise.data.documents import Options
from shardwise.data.encode import Setup
from shardwise.data.holdout import hold_out
from shardwise.data.index import TOKEN_BYTES, DataIndex, Origin, TokenizerRecord
from shardwise.data.output import existing_index, publish, real, work_directory, workspace, write_file
from shardwise.data.progress import Progress
from shardwise.data.shards import open_data
from shardwise.data.sources import Sources
from shardwise.data.survey import Survey, take_survey
from shardwise.data.tokenizer import CONTENT_FILES, Tokenizer, load_tokenizer
from shardwise.data.work import Work
from shardwise.spec import InputError

Say = Callable[[str], None]
Show = Callable[[Progress], None]


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    tokenizer: str | Path = "bytes",
    *,
    text_field: str = "text",
    skip_bad: bool = False,
    validation_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    say: Say | None = None,
    progress: Show | None = None,
) -> DataIndex:
    """Write all text of `sources` as token shards into `out` (docs/data.md has the formats).

    sources: paths of files and directories, patterns, and `hf:NAME[:CONFIG][@SPLIT]`. A text file is one document, and
    so is each line of JSON lines and each row of a table; after each stands the end-of-document id. Files that are
    empty or not UTF-8 text are left out and reported; broken lines and files are errors, or left out with `skip_bad`.
    tokenizer: `bytes`, an encoding of tiktoken such as `gpt2`, or the path of a Hugging Face tokenizer.json. It sees at
    most 2 MiB of text at once: a document of 1 MiB or more is cut at line ends, which can change the tokens next to a
    cut.
    validation_fraction: the share of the documents that is held out (see `hold_out`); where there is only one distinct
    document, its last lines are.
    shard_tokens: tokens of one shard file. workers: processes; as many as there are CPUs by default.

    Where `out` already holds exactly this data, it is verified and reused. Otherwise an interruption (KeyboardInterrupt
    too) or an InputError leaves what is finished in a hidden directory beside `out`, and the same call continues.
    """
    given = [sources] if isinstance(sources, str | Path) else sources
    found = Sources(tuple(map(str, given)))
    out = Path(out)
    for path in found.paths():
        if real(out).is_relative_to(real(path)):
            raise InputError(
                f"{out}: lies inside the source {path} and would be read as text; choose a place outside it"
            )
    return prepare_sources(
        found,
        out,
        load_tokenizer(tokenizer),
        Options(text_field, skip_bad, documents.CHUNK_BYTES, documents.PIECE_BYTES, documents.RECORD_BYTES),
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        workers=workers,
        say=say,
        progress=progress,
    )


def prepare_sources(
    sources: Sources,
    out: Path,
    tokenizer: Tokenizer,
    options: Options,
    *,
    validation_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    resumable: bool = True,
    say: Say | None = None,
    progress: Show | None = None,
) -> DataIndex:
    """`prepare` for what is found already. Not `resumable`: several processes may write `out` at once.

    Raises UnwritableError where `out` cannot be written, InputError for every other fault of the input.
    """
    if not 0 <= validation_fraction < 1:
        raise InputError(f"validation_fraction: at least 0 and below 1 is expected (it was {validation_fraction})")
    if shard_tokens < 1:
        raise InputError(f"shard_tokens: at least 1 is expected (it was {shard_tokens})")
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers < 1:
        raise InputError(f"workers: at least 1 is expected (it was {workers})")
    say = say or (lambda line: None)
    work = Work(sources, options, workers, say, progress or (lambda state: None))

    def origin_of(survey: Survey) -> Origin:
        return Origin(
            documents_sha256=survey.sha256, validation_fraction=validation_fraction, shard_tokens=shard_tokens
        )

    existing = existing_index(out)
    if existing is not None:
        with tempfile.TemporaryDirectory() as scratch:
            setup = Setup(Path(scratch), options, None, sources.rows)
            survey = take_survey(work.encode(setup), setup, sources, say)
        _require_same(existing, origin_of(survey), tokenizer, out)
        shutil.rmtree(work_directory(out), ignore_errors=True)  # an end in its last moment could leave it behind
        say(f"{out} already holds this data; it is intact and is reused")
        return existing
    with workspace(out, resumable=resumable, say=say) as place:
        setup = Setup(place, options, tokenizer, sources.rows)
        names = work.encode(setup)
        survey = take_survey(names, setup, sources, say)
        directory, index = _write(work, setup, names, survey, origin_of(survey))
        publish(directory, out, index)
    return index


def _require_same(existing: DataIndex, origin: Origin, tokenizer: Tokenizer, out: Path) -> None:
    record = existing.tokenizer
    if existing.origin != origin or (record.kind, record.sha256) != (tokenizer.kind, tokenizer.sha256):
        raise InputError(
            f"{out}: already holds data prepared from other text, or with another tokenizer, validation_fraction or "
            "shard_tokens; choose another directory or remove it"
        )
    open_data(out)


def _write(work: Work, setup: Setup, names: list[str], survey: Survey, origin: Origin) -> tuple[Path, DataIndex]:
    """A directory with everything but the index, and the index."""
    fraction = origin.validation_fraction
    held = np.zeros(len(survey.kept), dtype=np.bool_)
    held[survey.kept] = hold_out(survey.keys[survey.kept], survey.sizes[survey.kept], fraction)
    tail = None
    if fraction and not held.any():
        size = int(survey.sizes[survey.kept][0])
        tail = work.find_tail(size, fraction)
        if tail is None:
            work.say("no validation: there is one distinct document, of a single line, so nothing can be held out")
        else:
            work.say(f"there is one distinct document; its last {size - tail:,} bytes are held out for validation")
            names = work.cut_tail(setup, names, tail)
    layout = lay_out(names, setup, survey, held, tail, origin.shard_tokens)
    directory = setup.work / layout.name
    directory.mkdir(exist_ok=True)
    work.write(layout, directory, setup)
    train, validation = read_splits(layout, directory)
    tokenizer = _store_tokenizer(setup, directory)
    index = DataIndex(format=1, tokenizer=tokenizer, origin=origin, train=train, validation=validation)
    accounted = sum(file.text_bytes for file in (*train.files, *validation.files)) / survey.text_bytes
    if abs(accounted - 1) > 0.01:
        work.say(
            f"this tokenizer changes text: its tokens stand for {accounted:.1%} of the text's bytes, "
            "so bits per byte will be off by as much"
        )
    return directory, index


def _store_tokenizer(setup: Setup, directory: Path) -> TokenizerRecord:
    tokenizer = setup.tokenizer
    assert tokenizer
    sizes = io.BytesIO()
    np.save(sizes, setup.token_bytes)
    write_file(directory / TOKEN_BYTES, sizes.getvalue())
    if tokenizer.kind != "bytes":
        write_file(directory / CONTENT_FILES[tokenizer.kind], tokenizer.content)
    return TokenizerRecord(
        kind=tokenizer.kind,
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document,
        sha256=tokenizer.sha256,
        token_bytes_sha256=hashlib.sha256(sizes.getvalue()).hexdigest(),
    )
