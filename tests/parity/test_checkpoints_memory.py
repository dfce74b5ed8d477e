"""What an optimizer that shares out or offloads its state saves, any other layout restores, bit for bit, and back."""

import pytest
import torch
from matrix import ALL, SEQUENCE, SEQUENCES, make_run

from shardwise.checkpoints.manifest import step_name
from shardwise.checkpoints.restore import restore
from shardwise.checkpoints.save import Checkpointer
from shardwise.checkpoints.state import apply, collect, flatten
from shardwise.data import Order
from shardwise.parallel.apply import build_parallel
from shardwise.parallel.mesh import build_mesh
from shardwise.spec.recipe import Optimizer
from shardwise.training.batches import Batches
from shardwise.training.loop import Trainer
from shardwise.training.parity import RandomTokens

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LAYOUTS = {
    "alone": {},
    "FSDP×2": {"dp_shard": 2},
    "ZeRO-1×2": {"dp_shard": 2, "zero": 1},
    "ZeRO-1×4": {"dp_shard": 4, "zero": 1},
    "ZeRO-1×2 × TP×2": {"dp_shard": 2, "tp": 2, "zero": 1},
    "optimizer offloaded": {"offload": "optimizer"},
    "optimizer offloaded, FSDP×2": {"dp_shard": 2, "offload": "optimizer"},
    "optimizer offloaded, ZeRO-1×2": {"dp_shard": 2, "zero": 1, "offload": "optimizer"},
    "parameters offloaded, FSDP×2": {"dp_shard": 2, "offload": "parameters"},
}
WAYS = [(saver, "FSDP×2") for saver in LAYOUTS if saver != "FSDP×2"]
WAYS += [("alone", loader) for loader in LAYOUTS if loader not in ("alone", "FSDP×2")]
WAYS = WAYS if ALL else WAYS[::2]


def start(layout: str, seed: int):
    run = make_run("gpt", LAYOUTS[layout], "fp64", 1)
    recipe = run.recipe.model_copy(update={"optimizer": Optimizer(lr=0.01), "seed": seed})
    run = run.replace(recipe=recipe)
    mesh, device = build_mesh(run.layout, "cpu"), torch.device("cpu")
    module = build_parallel(run, mesh, device)
    return run, mesh, Trainer(run, module, wants_stop=lambda: False)


def losses(run, mesh, trainer, done: int, stop: int) -> list[float]:
    stream = RandomTokens(run)
    order = Order(stream.tokens, SEQUENCE, SEQUENCES, 0)
    batches = Batches(stream, order, run.layout, mesh.data_rank, run.model.vocabulary, torch.device("cpu"))
    found = []
    for step in trainer.steps(batches, order, done):
        found.append(step.loss)
        if step.step == stop:
            break
    batches.close()
    return found


def bits(trainer) -> dict[str, bytes]:
    found = {}
    for name, tensor in flatten(collect(trainer.module, trainer.optimizer)).items():
        if not name.startswith("rng/"):
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[name] = full.detach().numpy().tobytes()
    return found


def saved(directory, layout):
    run, mesh, trainer = start(layout, seed=0)
    losses(run, mesh, trainer, 0, 1)
    checkpointer = Checkpointer(directory, keep=1, asynchronous=False, say=print, timeout=60.0)
    checkpointer.save(1, collect(trainer.module, trainer.optimizer), tokens=0, run={}, data="abc")
    checkpointer.close()
    assert checkpointer.last_error is None
    then = bits(trainer)
    return then, losses(run, mesh, trainer, 1, 3)


def restored(directory, layout):
    run, mesh, trainer = start(layout, seed=1)
    state = collect(trainer.module, trainer.optimizer)
    restore(directory / step_name(1), state)
    apply(trainer.module, trainer.optimizer, state)
    then = bits(trainer)
    return then, losses(run, mesh, trainer, 1, 3)


@pytest.mark.parametrize(("saver", "loader"), WAYS, ids=[f"{saver} to {loader}" for saver, loader in WAYS])
def test_restored_on_another_layout(tmp_path, ranks, saver, loader):
    def world(layout):
        return make_run("gpt", LAYOUTS[layout], "fp64", 1).layout.world

    before = ranks(world(saver)).run(saved, tmp_path, saver)
    after = ranks(world(loader)).run(restored, tmp_path, loader)
    state, following = before[0]
    assert any(name.startswith("optimizer.embedding.weight.exp_avg") for name in state)
    assert all(then == state for then, _ in before + after)
    for _, continued in before + after:
        assert continued == pytest.approx(following, abs=1e-12)
