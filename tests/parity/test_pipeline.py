"""What is a pipeline's own: tied tables in checkpoints, and receive buffers that are given back."""

import pytest
import torch
from matrix import SEQUENCE, SEQUENCES, make_run

from shardwise.checkpoints.restore import restore
from shardwise.checkpoints.save import Checkpointer
from shardwise.checkpoints.state import apply, collect
from shardwise.data import Order
from shardwise.parallel.apply import build_parallel
from shardwise.parallel.compat import LeanStage
from shardwise.parallel.mesh import build_mesh
from shardwise.training.batches import Batches
from shardwise.training.loop import Trainer
from shardwise.training.parity import RandomTokens, whole_tensors


def built(layout: dict, model: str = "gpt", seed: int | None = None):
    run = make_run(model, layout, "fp64", 1)
    if seed is not None:
        run = run.replace(recipe=run.recipe.model_copy(update={"seed": seed}))
    device, mesh = torch.device("cpu"), build_mesh(run.layout, "cpu")
    module = build_parallel(run, mesh, device)
    stream = RandomTokens(run)
    order = Order(stream.tokens, SEQUENCE, SEQUENCES, 0)
    batches = Batches(stream, order, run.layout, mesh.data_rank, run.model.vocabulary, device)
    return module, Trainer(run, module, wants_stop=lambda: False), batches, order


def first_steps(directory, layout):
    """Weights and losses of two steps; all is saved in between."""
    module, trainer, batches, order = built(layout)
    steps = trainer.steps(batches, order, 0)
    losses = [next(steps).loss]
    saver = Checkpointer(directory, keep=1, asynchronous=False, say=print, timeout=60.0)
    saver.save(1, collect(module, trainer.optimizer), tokens=1, run={}, data="")
    saver.close()
    assert saver.last_error is None
    losses.append(next(steps).loss)
    batches.close()
    return whole_tensors(module), losses


def second_step(directory, layout):
    module, trainer, batches, order = built(layout, seed=5)
    state = collect(module, trainer.optimizer)
    restore(next(directory.iterdir()), state)
    apply(module, trainer.optimizer, state)
    loss = next(trainer.steps(batches, order, 1)).loss
    batches.close()
    return whole_tensors(module), loss


LAYOUTS = {"alone": {}, "PP×2": {"pp": 2}, "PP×2 × FSDP×2": {"pp": 2, "dp_shard": 2}, "TP×2": {"tp": 2},
           "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}}  # fmt: skip


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", ["PP×2", "PP×2 × FSDP×2", "TP×2"])
def test_a_tied_table_is_saved_once_and_restored_to_both_ends(ranks, tmp_path, before, after):
    worlds = [build_world(LAYOUTS[name]) for name in (before, after)]
    weights, losses = ranks(worlds[0]).run(first_steps, tmp_path, LAYOUTS[before])[0]
    for restored, loss in ranks(worlds[1]).run(second_step, tmp_path, LAYOUTS[after]):
        assert loss == pytest.approx(losses[1], abs=1e-12)
        assert all((restored[name] - weights[name]).abs().max() < 1e-12 for name in weights)


def build_world(layout: dict) -> int:
    return make_run("gpt", layout, "fp64", 1).layout.world


def tables_and_buffers(layout):
    module, trainer, batches, order = built(layout)
    next(trainer.steps(batches, order, 0))
    batches.close()
    tables = [p.detach().clone() for name, p in module.named_parameters() if name == "embedding.weight"]
    stages = module._pipeline._stages
    assert all(isinstance(stage, LeanStage) for stage in stages)
    infos = [info for stage in stages for row in stage.args_recv_info.values() for info in row]
    infos += [info for stage in stages for row in stage.grad_recv_info.values() for info in row]
    kept = [info.buffer for info in infos if getattr(info, "buffer", None) is not None]
    return tables, [str(buffer.device) for buffer in kept]


@pytest.mark.parametrize("layout", ["PP×2", "interleaved"])
def test_both_ends_have_the_same_table_and_no_receive_buffer_stays(ranks, layout):
    (first, kept), (last, _) = results = ranks(2).run(tables_and_buffers, LAYOUTS[layout])
    assert len(first) == len(last) == 1
    assert first[0].equal(last[0])
    assert kept
    assert {device for _, devices in results for device in devices} == {"meta"}
