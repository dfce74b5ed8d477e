"""Does a layout train the same model as one process? A few steps on either, and how far apart they end.

SGD, because AdamW turns a difference of 1e-7 in a gradient into one of 1e-4 in a weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.data import Order
from shardwise.parallel.apply import build_parallel
from shardwise.parallel.gradients import local
from shardwise.parallel.materialize import own_part
from shardwise.parallel.mesh import Mesh, build_mesh
from shardwise.parallel.module import MicroBatch, ParallelModule
from shardwise.spec import Run
from shardwise.training.batches import Batches
from shardwise.training.loop import Trainer


@dataclass(frozen=True)
class Trained:
    """What a few steps left behind on one rank. `initial` and `final` are the weights and buffers that it holds, by
    name: whole ones, or its parts (DTensors). All else is the same on every rank."""

    initial: dict[str, Tensor]
    tokens: tuple[str, ...]  # a hash of each step's batch, in the order of the batch
    losses: tuple[float, ...]
    norms: tuple[float | None, ...]
    scales: tuple[float | None, ...]
    validation: float  # loss of the first batch after the last step, without gradients
    final: dict[str, Tensor]
    names: tuple[str, ...]  # of all ranks' weights and buffers


class RandomTokens:
    """A stream of random ids. Its last window is partial, so that ranks see unequal numbers of targets."""

    def __init__(self, run: Run):
        self.tokens = run.recipe.total_steps * run.recipe.batch_sequences * run.recipe.sequence
        self.tokens -= run.recipe.sequence // 2 + 1
        self._ids = np.random.default_rng(0).integers(run.model.vocabulary, size=self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]


class _Watched(Batches):
    """Batches that remember this rank's ids."""

    def __init__(self, *arguments: object, **named: object):
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.seen: list[bytes] = []

    def take(self, index: int) -> list[MicroBatch]:
        batches = super().take(index)
        self.seen.append(b"".join(ids.cpu().numpy().tobytes() for ids, _ in batches))
        return batches


def train_few_steps(run: Run, device: torch.device, load: Callable[[str], Tensor] | None = None) -> Trained:
    """Train a Run of few steps from its first on random tokens, on the default process group. Called on every rank.

    load: gives the whole of an initial weight or buffer by its name, on the CPU; default: as the Run's seed has it.
    """
    layout = run.fixed_layout
    mesh = build_mesh(layout, device.type)
    module = build_parallel(run, mesh, device)
    if load is not None:
        _fill(module, load)
    initial = _snapshot(module)
    stream = RandomTokens(run)
    order = Order(stream.tokens, run.recipe.sequence, run.recipe.batch_sequences, run.recipe.seed)
    trainer = Trainer(run, module, wants_stop=lambda: False)
    batches = _Watched(stream, order, layout, mesh.data_rank, run.model.vocabulary, device)
    steps = list(trainer.steps(batches, order, 0))
    seen = batches.seen
    first = batches.take(0)
    batches.close()
    module.train(False)
    loss = torch.stack(trainer.losses(first)).sum().double()
    module.train(True)
    dist.all_reduce(loss)
    return Trained(
        initial,
        tuple(_in_order(mesh, seen)),
        tuple(step.loss for step in steps),
        tuple(step.grad_norm for step in steps),
        tuple(step.loss_scale for step in steps),
        float(loss) / order.targets(0),
        _snapshot(module),
        _names(initial),
    )


@torch.no_grad()
def whole_tensors(module: ParallelModule) -> dict[str, Tensor]:
    """The whole weights and buffers, by name, on every rank."""
    own = {name: _whole(tensor, module.device).detach().cpu().clone() for name, tensor in _tensors(module)}
    parts: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: tensor for part in parts for name, tensor in part.items()}


def _tensors(module: ParallelModule) -> list[tuple[str, Tensor]]:
    return [*module.named_buffers(), *module.named_parameters()]


@torch.no_grad()
def _snapshot(module: ParallelModule) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _tensors(module)}


def _names(own: dict[str, Tensor]) -> tuple[str, ...]:
    parts: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, list(own))
    return tuple(sorted({name for part in parts for name in part}))


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device of the process group, which offloaded shards are not on."""
    return tensor.to(device).full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _fill(module: ParallelModule, load: Callable[[str], Tensor]) -> None:
    for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
        full = load(name)
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(own_part(full, tensor))
        else:
            tensor.copy_(full)


def _in_order(mesh: Mesh, seen: list[bytes]) -> Iterator[str]:
    parts: list[tuple[int, list[bytes]]] = [(0, [])] * dist.get_world_size()
    dist.all_gather_object(parts, (mesh.data_rank, seen))
    ranks = dict(parts)
    for step in range(len(seen)):
        yield hashlib.sha256(b"".join(ranks[rank][step] for rank in sorted(ranks))).hexdigest()


@torch.no_grad()
def differences(trained: Trained, reference: Trained) -> dict[str, float]:
    """The largest absolute difference between what this rank has and one process: `initial weights`, `tokens`, `loss`,
    `gradient norm`, `weights`, `validation loss`. Infinite where there is something on one side only, or the tokens are
    not the same. Every rank compares its own copies and parts, so all are compared once each rank has done it."""
    return {
        "initial weights": _apart(trained.initial, trained.names, reference.initial),
        "tokens": 0.0 if trained.tokens == reference.tokens else float("inf"),
        "loss": _distance(trained.losses, reference.losses),
        "gradient norm": _distance(trained.norms, reference.norms),
        "weights": _apart(trained.final, trained.names, reference.final),
        "validation loss": _distance((trained.validation,), (reference.validation,)),
    }


def _apart(own: dict[str, Tensor], names: tuple[str, ...], whole: dict[str, Tensor]) -> float:
    if set(names) != whole.keys() or any(tensor.shape != whole[name].shape for name, tensor in own.items()):
        return float("inf")
    largest = 0.0
    for name, tensor in own.items():
        part = own_part(whole[name], tensor) if isinstance(tensor, DTensor) else whole[name]
        held = local(tensor).to(part.device)
        if held.shape != part.shape:
            return float("inf")
        if held.numel():
            largest = max(largest, _finite(float((held.double() - part.double()).abs().max())))
    return largest


def _distance(left: tuple[float | None, ...], right: tuple[float | None, ...]) -> float:
    if len(left) != len(right) or [x is None for x in left] != [x is None for x in right]:
        return float("inf")
    return max((_finite(abs(x - y)) for x, y in zip(left, right, strict=True) if x is not None and y is not None),
               default=0.0)  # fmt: skip


def _finite(number: float) -> float:
    return number if number == number else float("inf")
