"""Work: all pieces of the sources encoded, and all shards written, by however many workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.data.assemble import Layout, is_finished, write_shard
from shardwise.data.documents import BadRecord, Document, NotText, Options
from shardwise.data.encode import Setup, encode_piece, read_table
from shardwise.data.holdout import find_tail
from shardwise.data.pieces import Piece, plan_pieces, read_span
from shardwise.data.progress import Meter, Progress
from shardwise.data.sources import Sources
from shardwise.data.workers import Job, run_jobs
from shardwise.spec import InputError

_WORTH_A_WORKER = 20_000_000  # tokens that are written in about the time that a process takes to start


@dataclass(frozen=True)
class Work:
    """What is to be done, and whom to tell."""

    sources: Sources
    options: Options
    workers: int
    say: Callable[[str], None]
    show: Callable[[Progress], None]

    def encode(self, setup: Setup) -> list[str]:
        """Finish every piece; returns their names, in order. Raises InputError, OSError, WorkerDied."""
        sizes: dict[str, int] = {}  # of each piece; one that is there twice is encoded once
        for piece in self._pieces():
            sizes[setup.name(piece)] = piece.size
        finished = [name for name in sizes if setup.table(name).is_file()]
        if finished:
            self.say(f"continuing: {len(finished):,} of {len(sizes):,} pieces are finished already")
        names: list[str] = []
        given = set(finished)

        def jobs() -> Iterator[Job]:
            for piece in self._pieces():
                names.append(setup.name(piece))
                if names[-1] not in given:
                    given.add(names[-1])
                    yield functools.partial(encode_piece, piece, None)

        before, pending = sum(sizes[name] for name in finished), len(sizes) - len(finished)
        meter = Meter("reading", "B", sum(sizes.values()), before, self.show)
        run_jobs(jobs(), setup, max(1, min(self.workers, pending)), meter.tick)
        return names

    def find_tail(self, size: int, fraction: float) -> int | None:
        """`find_tail` of the only distinct document, which has `size` bytes."""
        for chunks in self._texts():
            seen = 0

            def checked(chunks: Iterator[bytes] = chunks) -> Iterator[bytes]:
                nonlocal seen
                for chunk in chunks:
                    chunk.decode()
                    seen += len(chunk)
                    yield chunk

            try:
                tail = find_tail(checked(), size, fraction)
            except (NotText, UnicodeDecodeError, BadRecord):
                continue
            if seen == size:
                return tail
        return None

    def cut_tail(self, setup: Setup, names: list[str], tail: int) -> list[str]:
        """Encode the pieces that hold byte `tail` of a document again, cut there; returns all names, in order.

        Raises InputError where the sources changed meanwhile.
        """
        jobs: list[Job] = []
        cut = list(names)
        for number, piece in enumerate(self._pieces()):
            if names[number : number + 1] != [setup.name(piece)]:
                raise InputError(f"{self.sources}: changed while it was being read; prepare again")
            rows, _ = read_table(setup, names[number])
            if ((rows["begin"] < tail) & (tail <= rows["begin"] + rows["size"])).any():
                cut[number] = setup.name(piece, tail)
                if not setup.table(cut[number]).is_file():
                    jobs.append(functools.partial(encode_piece, piece, tail))
        run_jobs(jobs, setup, 1, lambda *_: None)
        return cut

    def write(self, layout: Layout, directory: Path, setup: Setup) -> None:
        """Finish every shard. Raises InputError, OSError, WorkerDied."""
        pending = [shard for shard in layout.shards if not is_finished(shard, directory)]
        total, left = (sum(shard.tokens for shard in shards) for shards in (layout.shards, pending))
        meter = Meter("writing", "tokens", total, total - left, self.show)
        jobs = (functools.partial(write_shard, shard, directory) for shard in pending)
        workers = min(self.workers, len(pending), 1 + left // _WORTH_A_WORKER)
        run_jobs(jobs, setup, max(1, workers), meter.tick)

    def _pieces(self) -> Iterator[Piece]:
        return plan_pieces(self.sources, self.options)

    def _texts(self) -> Iterator[Iterator[bytes]]:
        """The chunks of each document, from all of its parts."""
        documents = (
            document
            for piece in self._pieces()
            for span in piece.spans
            for document in read_span(span, self.options, self.sources.rows)
        )
        for document in documents:
            if document.begin == 0:  # else a part of one that was given up
                yield _all_chunks(document, documents)


def _all_chunks(document: Document, following: Iterator[Document]) -> Iterator[bytes]:
    yield from document.chunks
    while not document.ends:
        document = next(following)
        yield from document.chunks
