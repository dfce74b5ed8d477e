"""Validation scores the same held-out tokens and gives the same loss at any world size."""

from pathlib import Path

import pytest
import torch
from matrix import LAYOUTS, make_run

from shardwise.data import open_data, prepare
from shardwise.evaluation.validation import validate
from shardwise.parallel.apply import build_parallel
from shardwise.parallel.mesh import build_mesh
from shardwise.spec import Run
from shardwise.training.loop import Trainer

SEQUENCE = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Text of the letters A and B, whose byte ids are below the test models' 67 ids but for the end of a document."""
    root = tmp_path_factory.mktemp("validation")
    (root / "text").mkdir()
    for number in range(8):
        (root / "text" / f"{number}.txt").write_text("AB" * (40 + 3 * number) + "A" * number)
    prepare(root / "text", root / "data", validation_fraction=0.4)
    return root / "data"


def score(run: Run, directory: Path, tokens: int):
    device = torch.device("cpu")
    mesh = build_mesh(run.layout, "cpu")
    module = build_parallel(run, mesh, device)
    trainer = Trainer(run, module, wants_stop=lambda: False)
    return validate(
        module,
        trainer.losses,
        open_data(directory),
        step=0,
        sequence=SEQUENCE,
        tokens=tokens,
        micro_batch=run.layout.micro_batch,
        data_rank=mesh.data_rank,
        data_ranks=run.layout.data_ranks,
        counts=mesh.counts_targets,
        vocabulary=run.model.vocabulary,
        device=device,
        wants_stop=lambda: False,
    )


@pytest.mark.parametrize("tokens", [5 * SEQUENCE, 1_000_000], ids=["few", "all"])
@pytest.mark.parametrize(
    "layout",
    ["DDP×2", "FSDP×4, zero 2", "HSDP 2×2, zero 3", "CP×4, ring", "CP×2 × TP×2, ring", "PP×4, 1f1b",
     "PP×2, interleaved", "PP×2, zbv", "PP×2 × FSDP×2, zero 3"],
)  # fmt: skip
def test_the_same_at_any_world_size(ranks, directory, layout, tokens):
    """The number of windows divides neither over the ranks nor over micro-batches of 3."""
    runs = [make_run("llama", degrees, "fp64", 1) for degrees in ({}, LAYOUTS[layout])]
    wide = {"model": runs[0].model.model_copy(update={"vocabulary": 258})}
    alone, spread = (run.replace(**wide, layout=run.layout.model_copy(update={"micro_batch": 3})) for run in runs)
    (reference,) = ranks(1).run(score, alone, directory, tokens)
    for result in ranks(spread.layout.world).run(score, spread, directory, tokens):
        assert result.tokens == reference.tokens
        assert result.loss == pytest.approx(reference.loss, abs=1e-12)
        assert result.bits_per_byte == pytest.approx(reference.bits_per_byte, abs=1e-12)
    if tokens == 5 * SEQUENCE:
        assert reference.tokens == tokens
