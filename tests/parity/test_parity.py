"""The parity matrix: every layout trains the same model as one process.

Initial weights are bit-equal and the tokens the same; loss, gradient norm, weights after three SGD steps and the
validation loss agree to rounding.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from layouts_page import page
from matrix import (
    ALL,
    EXPERT,
    LAYOUTS,
    STEPS,
    VARIATIONS,
    compare,
    failures,
    largest_micro_batch,
    layers_for,
    make_run,
    numbers,
    reference,
    refusals,
)

from shardwise.spec import Run
from shardwise.spec.combinations import SPLIT_BACKWARD
from shardwise.training.parity import Trained, differences

DENSE, MOE = ("llama", "gpt"), ("deepseek", "qwen-moe")


def models_of(layout: str) -> list[str]:
    """A dense model and one of experts, the first that can be trained on the layout; of expert layouts both MoEs."""
    if layout in EXPERT:
        return [model for model in MOE if not refusals(model, LAYOUTS[layout])]
    kinds = ([model for model in kind if not refusals(model, LAYOUTS[layout])] for kind in (DENSE, MOE))
    return [models[0] for models in kinds if models]


MAIN = [layout for layout in LAYOUTS if layout not in VARIATIONS]
CASES = [pytest.param(layout, model, id=f"{layout}-{model}") for layout in MAIN for model in models_of(layout)]


def check(ranks, layout: dict, model: str, precision: str, micro_batch: int) -> None:
    run = make_run(model, layout, precision, micro_batch, layers_for(layout))
    expected = reference(ranks, model, precision, run.model.layers)
    assert differences(expected, expected)["tokens"] == 0
    assert abs(expected.losses[-1] - expected.losses[0]) > 1e-3
    assert not failures(ranks(run.layout.world).run(compare, run, expected), precision)


def test_the_matrix_is_large():
    assert len(MAIN) >= 40
    assert LAYOUTS.keys() > VARIATIONS
    assert max(make_run("deepseek", layout, "fp64").layout.world for layout in LAYOUTS.values()) == 8
    assert {case.values[0] for case in CASES} == set(MAIN)
    assert sum(case.values[1] in MOE for case in CASES) >= 40
    assert all(models_of(layout) for layout in VARIATIONS)


# Every second layout, with a dense model and one with experts in turn; accumulated, below, every one with the other.
def in_turn(first: int, step: int = 1) -> list[Any]:
    if ALL:
        return CASES
    chosen = [(layout, models_of(layout)) for layout in MAIN[::step]]
    turns = [(layout, models[number % len(models)]) for number, (layout, models) in enumerate(chosen, first)]
    return [pytest.param(layout, model, id=f"{layout}-{model}") for layout, model in turns]


@pytest.mark.parametrize(("layout", "model"), in_turn(0, 2))
def test_few_micro_batches(ranks, layout, model):
    check(ranks, LAYOUTS[layout], model, "fp64", largest_micro_batch(LAYOUTS[layout]))


@pytest.mark.parametrize(("layout", "model"), in_turn(1))
def test_accumulated_and_recomputed(ranks, layout, model):
    """What splits its backward does not go with recompute."""
    again = {} if LAYOUTS[layout].get("schedule") in SPLIT_BACKWARD else {"recompute": "full"}
    check(ranks, LAYOUTS[layout] | again, model, "fp64", 1)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout in VARIATIONS][:: 1 if ALL else 2])
def test_variations(ranks, layout):
    check(ranks, LAYOUTS[layout], models_of(layout)[0], "fp64", 1)


@pytest.mark.parametrize("layout", MAIN[:: 1 if ALL else 6])
def test_fp32(ranks, layout):
    """With tied embeddings where that may be."""
    models = [model for model in ("gpt", "llama", "qwen-moe") if not refusals(model, LAYOUTS[layout])]
    check(ranks, LAYOUTS[layout], "qwen-moe" if layout in EXPERT else models[0], "fp32", 1)


NARROW = ["one process, FSDP", "DDP×2", "FSDP×2, zero 3", "HSDP 2×2, zero 2", "TP×2", "CP×2, ring", "PP×2, interleaved"]


def distance(left: tuple, right: tuple) -> float:
    return max(abs(x / y - 1) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("layout", NARROW)
def test_bf16_is_the_same_arithmetic_on_every_layout(ranks, layout):
    """Weights are cast where they are used: what differs is rounding of bf16 sums, not the recipe."""
    run = make_run("llama", LAYOUTS[layout], "bf16")
    expected, exact = reference(ranks, "llama", "bf16"), reference(ranks, "llama", "fp64")
    for found in ranks(run.layout.world).run(numbers, run, expected):
        assert found["initial weights"] == 0
        assert distance(found["losses"], expected.losses) < 2e-3
        assert distance(found["norms"], expected.norms) < 2e-2
        assert distance(found["losses"], exact.losses) < 5e-3


@pytest.mark.parametrize("layout", NARROW)
def test_fp16_with_loss_scale_is_the_same_on_every_layout(ranks, layout):
    run = make_run("llama", LAYOUTS[layout], "fp16")
    expected, exact = reference(ranks, "llama", "fp16"), reference(ranks, "llama", "fp64")
    for found in ranks(run.layout.world).run(numbers, run, expected):
        assert distance(found["losses"], expected.losses) < 5e-4
        assert distance(found["norms"], expected.norms) < 5e-3
        assert distance(found["losses"], exact.losses) < 1e-3
        assert found["scales"] == (2.0**16,) * STEPS


def numbers_with_scale(run: Run, expected: Trained, first_scale: float) -> dict[str, Any]:
    with mock.patch("shardwise.training.loss_scale._FIRST", first_scale):
        return numbers(run, expected)


@pytest.mark.parametrize("layout", ["DDP×2", "FSDP×4, zero 3", "TP×2", "PP×2, 1f1b"])
def test_fp16_overflow_skips_the_update_on_every_rank(ranks, layout):
    """At first the scale is far too high: nothing changes but the scale, on all ranks alike."""
    run = make_run("llama", LAYOUTS[layout], "fp16")
    for found in ranks(run.layout.world).run(numbers_with_scale, run, reference(ranks, "llama", "fp16"), 2.0**60):
        assert found["scales"] == (2.0**60, 2.0**59, 2.0**58)
        assert found["norms"] == (None,) * STEPS
        assert found["moved"] == 0


def test_the_table_of_layouts_is_that_of_the_legality_check():
    written = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
    assert written == page(), "python tests/parity/layouts_page.py > docs/layouts.md"
