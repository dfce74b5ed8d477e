"""The textbook formulas reproduce the figures printed beside them."""

from __future__ import annotations

import pytest

from shardwise.planner.classic import activation_bytes, zero_bytes, zero_bytes_per_parameter, zero_saving


def test_zero() -> None:
    assert [zero_bytes_per_parameter(8, stage) for stage in (0, 1, 2, 3)] == [16, 5.5, 3.75, 2]
    assert [round(zero_saving(8, stage), 1) for stage in (1, 2, 3)] == [2.9, 4.3, 8.0]
    assert zero_bytes(7e9, 8, 3) == 14e9
    # arXiv 1910.02054, figure 1: 7.5B parameters on 64 ranks.
    sizes = [zero_bytes(7.5e9, 64, stage) / 1e9 for stage in (0, 1, 2, 3)]
    assert sizes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_activations() -> None:
    shape = {"sequence": 8192, "micro_batch": 1, "hidden": 4096, "layers": 32, "heads": 32}
    assert activation_bytes(**shape) == pytest.approx(380e9, rel=0.001)
    tensor = activation_bytes(**shape, tensor_parallel=8)
    both = activation_bytes(**shape, tensor_parallel=8, sequence_parallel=True)
    assert both == activation_bytes(**shape) / 8 < tensor
    values = 8192 * 4096 * 32
    assert activation_bytes(**shape, recompute="selective") == 34 * values
    assert activation_bytes(**shape, recompute="selective", tensor_parallel=8) == 13 * values
    assert activation_bytes(**shape, recompute="full", tensor_parallel=8) == 2 * values
