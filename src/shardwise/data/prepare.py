"""prepare: text to token shards, once, before training.

Two passes over the source: the first decides what is text and what is held out, the second writes. Memory does not
grow with the text: it is 16 bytes a document, and one piece of one document.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from shardwise.data.documents import Document, NotText, TextFiles
from shardwise.data.holdout import find_tail, hold_out
from shardwise.data.index import TOKEN_BYTES, TOKENIZER, DataIndex, Origin, Split, TokenFile, TokenizerRecord
from shardwise.data.output import existing_index, publish, real, staged, write_file
from shardwise.data.shards import open_data
from shardwise.data.survey import Survey, content_key, take_survey
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.data.writer import ShardWriter
from shardwise.spec import InputError
from shardwise.spec.numbers import human

Say = Callable[[str], None]


def prepare(
    source: str | Path,
    out: str | Path,
    tokenizer: str = "bytes",
    *,
    validation_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    progress: Say | None = None,
) -> DataIndex:
    """Write the text file `source`, or all text files below the directory `source`, as token shards into `out`.

    Each file is one document, followed by the end-of-document id; files that are empty or not UTF-8 text are left out
    and reported. About `validation_fraction` of the documents is held out (see `hold_out`); where there is only one
    distinct document, its last lines are. Where `out` already holds exactly this data, it is verified and reused.

    tokenizer: `bytes`, or the path of a Hugging Face tokenizer.json. It sees at most 2 MiB of text at once: a document
    of 1 MiB or more is cut at line ends, which can change the tokens next to a cut.
    shard_tokens: tokens of one shard file.
    Raises InputError, and then leaves nothing behind but parent directories of `out`.
    """
    source, out = Path(source), Path(out)
    if real(out).is_relative_to(real(source)):
        raise InputError(f"{out}: lies inside the source {source} and would be read as text; choose a place outside it")
    return prepare_documents(
        TextFiles(source),
        out,
        load_tokenizer(tokenizer),
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        progress=progress,
    )


def prepare_documents(
    documents: Iterable[Document],
    out: Path,
    tokenizer: Tokenizer,
    *,
    validation_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    progress: Say | None = None,
) -> DataIndex:
    """`prepare` for any documents that can be iterated twice with the same result.

    Raises UnwritableError where `out` cannot be written, InputError for every other fault of the input.
    """
    if not 0 <= validation_fraction < 1:
        raise InputError(f"validation_fraction: at least 0 and below 1 is expected (it was {validation_fraction})")
    if shard_tokens < 1:
        raise InputError(f"shard_tokens: at least 1 is expected (it was {shard_tokens})")
    say = progress or (lambda line: None)

    def origin_of(survey: Survey) -> Origin:
        return Origin(
            documents_sha256=survey.sha256, validation_fraction=validation_fraction, shard_tokens=shard_tokens
        )

    existing = existing_index(out)
    if existing is not None:
        _require_same(existing, origin_of(take_survey(documents, say)), tokenizer, out)
        say(f"{out} already holds this data; it is intact and is reused")
        return existing
    with staged(out) as staging:  # before the first pass, so that an unwritable place is known at once
        survey = take_survey(documents, say)
        try:
            index = _write(documents, survey, staging, tokenizer, origin_of(survey), say)
        except NotText as error:
            raise InputError(f"{documents}: changed while it was being read ({error}); prepare again") from None
        publish(staging, out, index)
    return index


def _require_same(existing: DataIndex, origin: Origin, tokenizer: Tokenizer, out: Path) -> None:
    record = existing.tokenizer
    if existing.origin != origin or (record.kind, record.sha256) != (tokenizer.kind, tokenizer.sha256):
        raise InputError(
            f"{out}: already holds data prepared from other text, or with another tokenizer, validation_fraction or "
            "shard_tokens; choose another directory or remove it"
        )
    open_data(out)


def _write(
    documents: Iterable[Document], survey: Survey, directory: Path, tokenizer: Tokenizer, origin: Origin, say: Say
) -> DataIndex:
    """The second pass: everything but the index."""
    held = hold_out(survey.keys, survey.sizes, origin.validation_fraction)
    tail = None
    if origin.validation_fraction and not held.any():
        size = int(survey.sizes[0])
        lone = next(survey.kept(documents), None)
        tail = find_tail(lone, size, origin.validation_fraction) if lone else None
        if tail is None:
            say("no validation: there is one distinct document, of a single line, so nothing can be held out")
        else:
            say(f"there is one distinct document; its last {size - tail:,} bytes are held out for validation")

    token_bytes = tokenizer.token_bytes()
    written = 0

    def wrote(file: TokenFile) -> None:
        say(f"{file.name}: {human(file.tokens)} tokens ({written / survey.text_bytes:.0%} of the text is done)")

    train = ShardWriter(directory, "train", token_bytes, origin.shard_tokens, wrote)
    validation = ShardWriter(directory, "validation", token_bytes, origin.shard_tokens, wrote)
    end = np.array([tokenizer.end_of_document], dtype=np.int64)
    try:
        expected = zip(survey.keys, held, strict=True)
        for document in survey.kept(documents):
            key, is_held = next(expected, (None, False))
            writer = validation if is_held else train
            digest = hashlib.sha256()
            for piece, in_tail in _cut(document.pieces(), tail):
                if in_tail and writer is train:
                    train.append(end)
                    writer = validation
                digest.update(piece)
                writer.append(tokenizer.encode(piece.decode()))
                written += len(piece)
            writer.append(end)
            if content_key(digest.digest()) != key:
                raise InputError(f"{document.path}: changed while it was being read; prepare again")
        if next(expected, None):
            raise InputError(f"{documents}: documents vanished while they were being read; prepare again")
        files = train.close(), validation.close()
    finally:
        train.abandon()
        validation.abandon()

    sizes = io.BytesIO()
    np.save(sizes, token_bytes)
    write_file(directory / TOKEN_BYTES, sizes.getvalue())
    if tokenizer.content:
        write_file(directory / TOKENIZER, tokenizer.content)
    record = TokenizerRecord(
        kind=tokenizer.kind,
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document,
        sha256=tokenizer.sha256,
        token_bytes_sha256=hashlib.sha256(sizes.getvalue()).hexdigest(),
    )
    splits = _splits(survey, held, tail, files)
    _report(splits, say)
    return DataIndex(format=1, tokenizer=record, origin=origin, train=splits[0], validation=splits[1])


def _cut(pieces: Iterator[bytes], tail: int | None) -> Iterator[tuple[bytes, bool]]:
    """The pieces, cut at byte `tail` of their document, and whether each one lies behind it."""
    position = 0
    for piece in pieces:
        head = len(piece) if tail is None else min(len(piece), max(0, tail - position))
        if head:
            yield piece[:head], False
        if head < len(piece):
            yield piece[head:], True
        position += len(piece)


def _splits(
    survey: Survey, held: np.ndarray, tail: int | None, files: tuple[tuple[TokenFile, ...], tuple[TokenFile, ...]]
) -> tuple[Split, Split]:
    if tail is None:
        documents = int((~held).sum()), int(held.sum())
        text_bytes = int(survey.sizes[~held].sum()), int(survey.sizes[held].sum())
    else:  # every copy of the one document stands on both sides
        documents = len(held), len(held)
        text_bytes = tail * len(held), survey.text_bytes - tail * len(held)
    train, validation = (
        Split(documents=documents[side], text_bytes=text_bytes[side], files=files[side]) for side in (0, 1)
    )
    return train, validation


def _report(splits: tuple[Split, Split], say: Say) -> None:
    text = sum(split.text_bytes for split in splits)
    for name, split in zip(("train", "validation"), splits, strict=True):
        share = split.text_bytes / text
        say(f"{name}: {human(split.tokens)} tokens, {split.documents:,} documents, {share:.2%} of the text")
    accounted = sum(file.text_bytes for split in splits for file in split.files) / text
    if abs(accounted - 1) > 0.01:
        say(
            f"this tokenizer changes text: its tokens stand for {accounted:.1%} of the text's bytes, "
            "so bits per byte will be off by as much"
        )
