"""One rank, rehearsed on a CPU, with everything that is said about it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.planner.memory.families import family_of
from shardwise.planner.stacks import generation
from shardwise.rehearsal.allocator import reserved_peak
from shardwise.rehearsal.ledger import Ledger, part_of
from shardwise.rehearsal.picture import memory_svg
from shardwise.rehearsal.snapshot import write_snapshot
from shardwise.rehearsal.trace import trace
from shardwise.spec import Run
from shardwise.spec.memory import PARTS

LARGEST = 8  # groups of blocks that are named


def on_cpu(run: Run, rank: int, steps: int, imbalance: float, directory: Path | None) -> dict[str, Any]:
    """The fields of a Rehearsal, but for what the planner says. Pictures go to the directory."""
    warnings.simplefilter("ignore")  # torch's own, about its own names
    traced = trace(run, rank, steps=steps, imbalance=imbalance)
    ledger, peak = traced.ledger, traced.ledger.peak()
    block = ledger.blocks[ledger.events[peak][0]]
    cpu = generation(run.cluster.gpu) == "cpu"
    workspace = family_of("shardwise", cpu=cpu).workspace
    parts = {part: float(size) for part, size in ledger.parts(peak).items()}
    parts["transient"] += workspace
    modelled = list(traced.modelled)
    if workspace:
        modelled.append(f"workspaces of libraries: {workspace / 2**20:.0f} MiB, as measured on one H200 (in transient)")
    if not cpu:
        modelled.append("reserved: the stream of allocations through a model of torch's caching allocator")
    exact = ["live bytes by part: every allocation of this rank's own training step, on fake tensors"]
    return {
        "rank": rank,
        "mesh": traced.mesh,
        "device": "cpu, fake tensors",
        "parts": parts,
        # A CPU has no such allocator.
        "reserved": sum(parts.values()) if cpu else workspace + reserved_peak(stream_of(ledger), expandable=True),
        "reserved_default": None if cpu else workspace + reserved_peak(stream_of(ledger), expandable=False),
        "host": float(ledger.host_peak),
        "peak_op": block.operator,
        "peak_module": block.module,
        "largest": largest(ledger, peak),
        "flops": traced.flops,
        "exact": exact,
        "modelled": modelled,
        "seconds": traced.seconds,
        "pictures": draw(ledger, directory, f"rank {rank}, {traced.mesh}", rank) if directory else [],
    }


def draw(ledger: Ledger, directory: Path, title: str, rank: int) -> list[str]:
    """The timeline as an SVG file, and a snapshot for PyTorch's memory viewer."""
    picture, snapshot = directory / f"memory-rank{rank}.svg", directory / f"memory-rank{rank}.pickle"
    picture.write_text(memory_svg(ledger, f"live memory, {title}"), encoding="utf-8")
    write_snapshot(ledger, snapshot)
    return [str(picture), str(snapshot)]


def largest(ledger: Ledger, event: int) -> list[tuple[str, str, str, int]]:
    """(part, operator, module, bytes), the same of all blocks together: what an engineer would look at first."""
    sums = ledger.held(event, lambda block: f"{part_of(block)}|{block.operator}|{_kind_of_module(block.module)}")
    named = [(*name.split("|"), size) for name, size in sums.most_common(LARGEST)]
    assert all(part in PARTS for part, *_ in named)
    return named  # type: ignore[return-value]


def _kind_of_module(name: str) -> str:
    """blocks.7.mlp.gate -> blocks.*.mlp.gate"""
    words = name.split(".")
    return ".".join([words[0], "*", *words[2:]]) if words[0] == "blocks" and len(words) > 1 else name


def stream_of(ledger: Ledger) -> Iterator[tuple[int, int, str]]:
    """For the model of the allocator."""
    for number, allocated in ledger.events:
        block = ledger.blocks[number]
        if block.kind != "host" and block.size:
            yield number, block.size if allocated else 0, block.stream
