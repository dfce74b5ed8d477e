"""The parity matrix: every layout trains the same model as one process.

Initial weights are bit-equal and the tokens the same; loss, gradient norm, weights after three SGD steps and the
validation loss agree to rounding.
"""

from pathlib import Path
from unittest import mock

import pytest
from layouts_page import page
from matrix import (
    EXPERT,
    LAYOUTS,
    STEPS,
    compare,
    failures,
    largest_micro_batch,
    layers_for,
    make_run,
    reference,
    refusals,
    train,
)

from shardwise.spec import Run
from shardwise.training.parity import Trained, differences

DENSE, MOE = ("llama", "gpt"), ("deepseek", "qwen-moe")


def models_of(layout: str) -> list[str]:
    """A dense model and one of experts, the first that can be trained on the layout; of expert layouts both MoEs."""
    if layout in EXPERT:
        return [model for model in MOE if not refusals(model, LAYOUTS[layout])]
    kinds = ([model for model in kind if not refusals(model, LAYOUTS[layout])] for kind in (DENSE, MOE))
    return [models[0] for models in kinds if models]


CASES = [pytest.param(layout, model, id=f"{layout}-{model}") for layout in LAYOUTS for model in models_of(layout)]


def check(ranks, layout: dict, model: str, precision: str, micro_batch: int) -> None:
    run = make_run(model, layout, precision, micro_batch, layers_for(layout))
    expected = reference(ranks, model, precision, run.model.layers)
    assert differences(expected, expected)["tokens"] == 0
    assert abs(expected.losses[-1] - expected.losses[0]) > 1e-3
    assert not failures(ranks(run.layout.world).run(compare, run, expected), precision)


def test_the_matrix_is_large():
    assert len(LAYOUTS) >= 40
    assert max(make_run("deepseek", layout, "fp64").layout.world for layout in LAYOUTS.values()) == 8
    assert {case.values[0] for case in CASES} == LAYOUTS.keys()
    assert sum(case.values[1] in DENSE for case in CASES) >= 40
    assert sum(case.values[1] in MOE for case in CASES) >= 40


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_few_micro_batches(ranks, layout, model):
    check(ranks, LAYOUTS[layout], model, "fp64", largest_micro_batch(LAYOUTS[layout]))


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_accumulated_and_recomputed(ranks, layout, model):
    check(ranks, LAYOUTS[layout] | {"recompute": "full"}, model, "fp64", 1)


@pytest.mark.parametrize("layout", LAYOUTS)
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
    for result in ranks(run.layout.world).run(train, run):
        assert differences(result, expected)["initial weights"] == 0
        assert distance(result.losses, expected.losses) < 2e-3
        assert distance(result.norms, expected.norms) < 2e-2
        assert distance(result.losses, exact.losses) < 5e-3


@pytest.mark.parametrize("layout", NARROW)
def test_fp16_with_loss_scale_is_the_same_on_every_layout(ranks, layout):
    run = make_run("llama", LAYOUTS[layout], "fp16")
    expected, exact = reference(ranks, "llama", "fp16"), reference(ranks, "llama", "fp64")
    for result in ranks(run.layout.world).run(train, run):
        assert distance(result.losses, expected.losses) < 5e-4
        assert distance(result.norms, expected.norms) < 5e-3
        assert distance(result.losses, exact.losses) < 1e-3
        assert result.scales == (2.0**16,) * STEPS


def train_with_scale(run: Run, first_scale: float) -> Trained:
    with mock.patch("shardwise.training.loss_scale._FIRST", first_scale):
        return train(run)


@pytest.mark.parametrize("layout", ["DDP×2", "FSDP×4, zero 3", "TP×2", "PP×2, 1f1b"])
def test_fp16_overflow_skips_the_update_on_every_rank(ranks, layout):
    """At first the scale is far too high: nothing changes but the scale, on all ranks alike."""
    run = make_run("llama", LAYOUTS[layout], "fp16")
    for result in ranks(run.layout.world).run(train_with_scale, run, 2.0**60):
        assert result.scales == (2.0**60, 2.0**59, 2.0**58)
        assert result.norms == (None,) * STEPS
        assert all((result.final[name] == tensor).all() for name, tensor in result.initial.items())


def test_the_table_of_layouts_is_that_of_the_legality_check():
    written = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
    assert written == page(), "python tests/parity/layouts_page.py > docs/layouts.md"
