"""The parts of a rehearsal: the ledger, the model of the allocator, and what a trace of the trainer must hold."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from memory_trace import example
from shardwise.planner.parameters import count_parameters
from shardwise.rehearsal.allocator import MIB, reserved_peak
from shardwise.rehearsal.child import in_children
from shardwise.rehearsal.ledger import Block, Ledger
from shardwise.rehearsal.picture import memory_svg
from shardwise.rehearsal.rank import on_cpu
from shardwise.rehearsal.snapshot import write_snapshot
from shardwise.spec.memory import PARTS


def block(size: int, kind: str = "", **fields: Any) -> Block:
    return Block(size=size, kind=kind, operator="mm", module="head", begin=0, **fields)


def test_ledger_tells_parts_by_life() -> None:
    """What outlives the call that allocated it is kept for the backward; what does not is temporary."""
    ledger = Ledger()
    ledger.allocate(block(100, "parameters"))
    ledger.begin()
    kept = ledger.allocate(block(10, forward=True, call=1))
    passing = ledger.allocate(block(5, forward=True, call=1))
    ledger.free(passing, call=1)
    ledger.free(kept, call=0)
    parts = ledger.parts(ledger.peak())
    assert {part: parts[part] for part in PARTS if parts[part]} == {
        "parameters": 100,
        "activations": 10,
        "transient": 5,
    }
    assert ledger.live == 100 and ledger.sizes[ledger.peak()] == 115


def test_host_memory_is_apart() -> None:
    ledger = Ledger()
    number = ledger.allocate(block(7))
    ledger.allocate(block(50, "host"))
    ledger.to_host(number)
    assert (ledger.live, ledger.host, ledger.alive(1)) == (0, 57, [])


@pytest.mark.parametrize(
    ("sizes", "plain", "expandable"),
    [
        ([512], 2, 2),  # a small request takes 2 MiB
        ([MIB, MIB, MIB], 4, 4),
        ([MIB + 512], 20, 20),  # a middling one 20 MiB
        ([MIB + 512, 18 * MIB - 512], 20, 20),  # and the rest serves the next
        ([11 * MIB], 12, 20),  # a large one a segment of its own, in steps of 2 MiB; or pages of 20
        ([30 * MIB, 30 * MIB], 60, 60),
    ],
    ids=str,
)
def test_allocator_of_requests(sizes: list[int], plain: int, expandable: int) -> None:
    stream = [(number, size, "") for number, size in enumerate(sizes)]
    assert reserved_peak(stream, expandable=False) == plain * MIB
    assert reserved_peak(stream, expandable=True) == expandable * MIB


def test_allocator_fragments_without_expandable_segments() -> None:
    """Two freed segments cannot serve a request as large as both; two freed neighbours can."""
    stream = [(0, 40 * MIB, ""), (1, 40 * MIB, ""), (0, 0, ""), (1, 0, ""), (2, 80 * MIB, "")]
    assert reserved_peak(stream, expandable=False) == 160 * MIB
    assert reserved_peak(stream, expandable=True) == 80 * MIB


def test_allocator_keeps_streams_apart() -> None:
    stream = [(0, 40 * MIB, ""), (0, 0, ""), (1, 40 * MIB, "gather")]
    assert reserved_peak(stream, expandable=True) == 80 * MIB


def test_freed_blocks_merge() -> None:
    """In whatever order they are freed."""
    stream = [(n, 5 * MIB, "") for n in range(4)] + [(n, 0, "") for n in (1, 3, 0, 2)]
    assert reserved_peak([*stream, (4, 20 * MIB, "")], expandable=False) == 20 * MIB
    assert reserved_peak([*stream[:-1], (4, 20 * MIB, "")], expandable=False) == 40 * MIB  # one is in the way


def test_pictures(tmp_path: Path) -> None:
    ledger = Ledger()
    for kind in ("parameters", "gradients", ""):
        ledger.allocate(block(1024, kind))
    ledger.free(2, call=0)
    picture = memory_svg(ledger, "a & b")
    assert picture.count("<polygon") == 3 and "a &amp; b" in picture
    write_snapshot(ledger, tmp_path / "snapshot.pickle")
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    (trace,) = snapshot["device_traces"]
    assert [entry["action"] for entry in trace] == ["alloc"] * 3 + ["free_requested", "free_completed"]
    assert trace[2]["addr"] == trace[3]["addr"] and trace[0]["frames"][1]["name"] == "head"


MODEL = {"name": "t", "layers": 4, "hidden": 128, "heads": 4, "ffn": 256, "vocabulary": 512, "max_sequence": 256}
MOE = MODEL | {"experts": {"count": 8, "top_k": 2, "ffn": 64}}
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (MODEL, {"dp_replicate": 2}),
    (MODEL, {"dp_shard": 4, "zero": 1}),
    (MODEL, {"dp_replicate": 2, "dp_shard": 2, "recompute": "selective"}),
    (MODEL, {"dp_shard": 2, "tp": 2, "loss": "chunked"}),
    (MODEL, {"dp_shard": 2, "cp": 2, "cp_method": "ring"}),
    (MODEL, {"dp_shard": 2, "pp": 2, "schedule": "zbv", "virtual_stages": 2, "zero": 2}),
    (MOE, {"dp_shard": 4, "ep": 4}),
    (MODEL, {"dp_shard": 4, "offload": "optimizer"}),
]


def test_every_dimension_is_rehearsed() -> None:
    """Parameters and optimizer state are what the layout says, FLOPs those of the layers, and nothing is left over."""
    runs = [example(model, 128, 4 if layout.get("pp") else 2, None, **layout) for model, layout in LAYOUTS]
    for run, found in zip(runs, in_children(on_cpu, [(run, 0, 2, 1.0, None) for run in runs]), strict=True):
        layout = run.fixed_layout
        parameters = 4 * count_parameters(run.model).total
        shares = layout.world // layout.dp_replicate if layout.zero >= 2 else 1
        assert found["parts"]["parameters"] == pytest.approx(parameters / shares, rel=0.2)
        states = 2 * parameters / (layout.world if layout.zero == 1 else shares)
        held = found["host"] if layout.offload == "optimizer" else found["parts"]["optimizer"]
        assert held == pytest.approx(states, rel=0.2)
        assert min(found["parts"].values()) >= 0
        assert found["reserved_default"] >= sum(found["parts"].values()) * 0.999
        assert found["flops"]["mm"] > 0 and found["peak_op"] and found["peak_module"]


def test_imbalance_is_more_rows() -> None:
    run = example(MOE, 256, 2, None, dp_shard=4, ep=4)
    even, hot = in_children(on_cpu, [(run, 0, 2, factor, None) for factor in (1.0, 3.0)])
    assert hot["flops"]["_grouped_mm"] == pytest.approx(3 * even["flops"]["_grouped_mm"], rel=0.01)
    assert sum(hot["parts"].values()) > sum(even["parts"].values())


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_children(divmod, [(1, 0)]))
