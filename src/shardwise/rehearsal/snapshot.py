"""A memory snapshot as torch.cuda.memory._dump_snapshot writes it, which https://pytorch.org/memory_viz opens."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from shardwise.rehearsal.ledger import Block, Ledger, part_of


def write_snapshot(ledger: Ledger, path: Path) -> None:
    """The reported step as a trace of allocations and releases, after those that it began with. Stack frames are: the
    operator, the module, the part of memory. Addresses are made up."""
    addresses: dict[int, int] = {}
    next_address = 0x7F0000000000
    trace: list[dict[str, Any]] = []
    frames: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    before = [
        number
        for number, block in enumerate(ledger.blocks)
        if block.begin < ledger.start <= block.end and block.kind != "host"
    ]
    events = [(number, True) for number in before] + ledger.events[ledger.start :]
    for time, (number, allocated) in enumerate(events):
        block = ledger.blocks[number]
        if block.kind == "host" or (not allocated and number not in addresses):
            continue
        if allocated:
            addresses[number] = next_address
            next_address += max(block.size, 512)
        entry = {
            "addr": addresses[number],
            "size": block.size,
            "stream": 0,
            "frames": frames.setdefault((block.operator, block.module, part_of(block)), _frames(block)),
            "time_us": time,
        }
        if allocated:
            trace.append({"action": "alloc", **entry})
        else:
            trace += [{"action": "free_requested", **entry}, {"action": "free_completed", **entry}]
    segment = {
        "address": 0x7F0000000000,
        "total_size": next_address - 0x7F0000000000,
        "stream": 0,
        "segment_type": "large",
        "allocated_size": 0,
        "active_size": 0,
        "device": 0,
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": [],
    }
    snapshot = {"segments": [segment], "device_traces": [trace], "allocator_settings": {}}
    path.write_bytes(pickle.dumps(snapshot, protocol=4))


def _frames(block: Block) -> list[dict[str, Any]]:
    return [
        {"filename": name, "line": 0, "name": name} for name in (block.operator, block.module, part_of(block)) if name
    ]
