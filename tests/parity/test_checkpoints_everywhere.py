"""A checkpoint of any layout continues on any other: experts with latent attention, Adam, buffers and all."""

import pytest
import torch
from matrix import ALL, SEQUENCE, SEQUENCES, make_run

from shardwise.checkpoints.restore import restore
from shardwise.checkpoints.save import Checkpointer
from shardwise.checkpoints.state import apply, collect
from shardwise.data import Order
from shardwise.parallel.apply import build_parallel
from shardwise.parallel.mesh import build_mesh
from shardwise.spec.recipe import Optimizer
from shardwise.training.batches import Batches
from shardwise.training.loop import Trainer
from shardwise.training.parity import RandomTokens

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LAYOUTS = {
    "one process": {},
    "DDP×2": {"dp_replicate": 2},
    "ZeRO-1×4": {"dp_shard": 4, "zero": 1},
    "HSDP 2×2": {"dp_replicate": 2, "dp_shard": 2},
    "EP×2 over FSDP×4": {"dp_shard": 4, "ep": 2},
    "FSDP×2 × TP×2": {"dp_shard": 2, "tp": 2},
    "CP×2, zero 3": {"cp": 2, "zero": 3},
    "PP×2 × TP×2, interleaved": {"pp": 2, "tp": 2, "schedule": "interleaved", "virtual_stages": 2},
}


def run_of(layout: dict, seed: int = 0):
    run = make_run("deepseek", layout, "fp64")
    return run.replace(recipe=run.recipe.model_copy(update={"optimizer": Optimizer(lr=0.01), "seed": seed}))


def steps_of(run, done: int, before=None):
    """The trainer and its Steps after `done`; `before` is done to the trainer first."""
    mesh, device = build_mesh(run.layout, "cpu"), torch.device("cpu")
    trainer = Trainer(run, build_parallel(run, mesh, device), wants_stop=lambda: False)
    if before:
        before(trainer)
    stream = RandomTokens(run)
    order = Order(stream.tokens, SEQUENCE, SEQUENCES, 0)
    batches = Batches(stream, order, run.layout, mesh.data_rank, run.model.vocabulary, device)
    return trainer, trainer.steps(batches, order, done), batches


def save_after_one(directory, layout: dict) -> list[float]:
    """Train to the end, and save after the first step; the later losses."""
    trainer, steps, batches = steps_of(run_of(layout), 0)
    next(steps)
    saver = Checkpointer(directory, keep=1, asynchronous=False, say=print, timeout=60.0)
    saver.save(1, collect(trainer.module, trainer.optimizer), tokens=1, run={}, data="")
    saver.close()
    assert saver.last_error is None
    losses = [step.loss for step in steps]
    batches.close()
    return losses


def continue_from(directory, layout: dict) -> list[float]:
    """From other initial weights, restored."""

    def load(trainer: Trainer) -> None:
        state = collect(trainer.module, trainer.optimizer)
        restore(next(directory.iterdir()), state)
        apply(trainer.module, trainer.optimizer, state)

    _, steps, batches = steps_of(run_of(layout, seed=7), 1, load)
    losses = [step.loss for step in steps]
    batches.close()
    return losses


def world(layout: dict) -> int:
    return run_of(layout).layout.world


@pytest.mark.parametrize("saver", LAYOUTS)
def test_each_into_each_other(ranks, tmp_path, saver):
    expected = ranks(world(LAYOUTS[saver])).run(save_after_one, tmp_path, LAYOUTS[saver])[0]
    assert len(expected) == 2
    first = list(LAYOUTS).index(saver)
    for number, (loader, layout) in enumerate(LAYOUTS.items()):
        if not ALL and (number - first) % 2:  # every second one after itself
            continue
        for losses in ranks(world(layout)).run(continue_from, tmp_path, layout):
            assert losses == pytest.approx(expected, abs=1e-5), loader
