"""One step of our own trainer on one rank, traced on a CPU: no memory, no communication."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.parallel.apply import build_parallel
from shardwise.parallel.compat import fake_process_group, without_compiled_code
from shardwise.parallel.mesh import build_mesh
from shardwise.planner.stacks import generation
from shardwise.rehearsal.compiled import compiled_without_kernels
from shardwise.rehearsal.host import two_memories
from shardwise.rehearsal.labels import accumulated, received
from shardwise.rehearsal.ledger import Ledger
from shardwise.rehearsal.operators import cuda_operators
from shardwise.rehearsal.replica import Replica
from shardwise.rehearsal.tracker import Tracker
from shardwise.rehearsal.where import Where
from shardwise.rehearsal.world import building, drop_nothing, to_empty, without_values
from shardwise.spec import Run
from shardwise.training.loop import Trainer


@dataclass
class Trace:
    """The last of the steps. held: bytes between two steps, by part."""

    ledger: Ledger
    held: dict[str, int]
    flops: dict[str, int]
    mesh: str  # where the rank stands
    modelled: list[str] = field(default_factory=list)  # what was not done as the trainer does it
    seconds: float = 0.0


def trace(run: Run, rank: int, *, steps: int = 2, imbalance: float = 1.0) -> Trace:
    """The Run needs a layout and a batch. The first step has not all of the optimizer's state, so one step is reported
    as its second. A process group has one life in a process: see `child.py`."""
    start, layout, modelled = time.perf_counter(), run.fixed_layout, []
    fake_process_group(rank, layout.world)
    if layout.compile:
        modelled.append(f"layout.compile: saved as by Inductor of torch {torch.__version__}; which kernels it fuses")
        run = run.replace(layout=layout.model_copy(update={"async_tp": False}))
    if layout.async_tp:
        modelled.append("async_tp: products and collectives one after the other")
    mesh = build_mesh(layout, "cpu")
    with building(), compiled_without_kernels(lambda: tracker):
        module = build_parallel(run, mesh, torch.device("cpu"))
    if layout.compile and any(isinstance(stage, Replica) for stage in module.stages.values()):
        modelled.append("layout.compile with DDP: whole blocks, where torch cuts them by DDP's buckets")
    if drop_nothing(module.modules()):
        modelled.append("capacity: no token copy is dropped")
    experts = run.model.experts
    if experts and layout.ep > 1:
        modelled.append(f"routing: every rank sends evenly and receives {imbalance:g} times the mean")
    where = Where((getattr(stage, "module", stage) for stage in module.stages.values()), compiled=layout.compile)
    vocabulary = run.model.vocabulary // layout.tp
    offloaded = layout.offload == "parameters"
    if offloaded:
        modelled.append("offload parameters: a unit's shards are not counted while they visit the device")
    tracker = Tracker(where, vocabulary, shards_on_host=offloaded)
    home = "host" if offloaded else ""
    operators = cuda_operators() if generation(run.cluster.gpu) != "cpu" else contextlib.nullcontext()
    with (
        operators,
        without_compiled_code() if layout.compile else contextlib.nullcontext(),
        without_values(imbalance),
        two_memories(tracker),
        received(tracker),
        FakeTensorMode(allow_non_fake_inputs=True),
        tracker.watching(),
    ):
        with tracker.labelling(home):
            to_empty(module.stages, torch.device("cpu"))
        tracker.relabel(module.parameters(), "parameters")
        accumulated(tracker, module.parameters())
        trainer = Trainer(run, module, lambda: False)
        updated = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
        tracker.relabel(updated, "parameters")  # with zero 1 some are copies
        for step in range(steps):
            if step == steps - 1:
                tracker.ledger.begin()
                tracker.flops.clear()
            forward_and_update(trainer, torch.device("cpu"), tracker, home)
        held = tracker.ledger.parts(tracker.ledger.start)
    return Trace(
        tracker.ledger, dict(held), dict(tracker.flops), mesh.describe(), modelled, time.perf_counter() - start
    )


def forward_and_update(trainer: Trainer, device: torch.device, tracker: Tracker | None = None, home: str = "") -> None:
    """What `Trainer.steps` does between two batches; values are read on a GPU only, since a CPU's are not there.
    home: "host" where shards live there."""
    run, module, layout = trainer.run, trainer.module, trainer.run.fixed_layout
    micro_batches = run.recipe.batch_sequences // (layout.data_ranks * layout.micro_batch)
    shape = (micro_batches, layout.micro_batch, run.recipe.sequence)
    enter(tracker, "input")
    # Random, since equal ids make the embedding and a router unlike themselves.
    ids, labels = (torch.randint(run.model.vocabulary, shape, device=device) for _ in range(2))
    batch = list(zip(ids, labels, strict=True))
    enter(tracker, "pass")
    loss = trainer._forward_backward(batch, 1)
    enter(tracker, "update")
    if tracker is not None:
        tracker.relabel([p.grad for p in module.parameters() if p.grad is not None], "gradients")
    with tracker.labelling(home) if tracker is not None else contextlib.nullcontext():
        norm = module.gradient_norm()
        if device.type == "cuda":
            trainer._agree(loss, norm)  # the host waits for the device
        trainer._update(2.0, 1e-3)
    if tracker is not None:
        for state in trainer.optimizer.state.values():
            tracker.relabel((value for value in state.values() if isinstance(value, torch.Tensor)), "optimizer")
    module.drop_gradients()


def enter(tracker: Tracker | None, phase: str) -> None:
    if tracker is not None:
        tracker.phase = phase
