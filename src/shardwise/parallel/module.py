"""ParallelModule: the Run's model as this rank holds it, and how the micro-batches of a step go through it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.model.block import Block
from shardwise.parallel.context import SequenceCut
from shardwise.parallel.data import micro_step
from shardwise.parallel.gradients import (
    add_other_copy,
    all_reduce_gradients,
    copies,
    norm_of,
    scale,
    sum_partial,
)
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.place import is_expert
from shardwise.spec import Layout

MicroBatch = tuple[Tensor, Tensor]  # ids, labels: each (micro_batch, S) int64


class ParallelModule:
    """One rank's stages, by number (without a pipeline there is one), with everything that is theirs in common.

    Parameters and buffers have the names of the whole Decoder's, whatever wraps them.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        stages: dict[int, nn.Module],
        cut: SequenceCut,
        device: torch.device,
        reduce: torch.dtype,
    ):
        self.layout, self.mesh, self.stages, self.device = layout, mesh, stages, device
        self._cut, self._reduce_dtype = cut, reduce
        self._pipeline = Pipeline(layout, mesh, stages, cut.length, device) if layout.pp > 1 else None

    def accumulate(self, micro_batches: list[MicroBatch], factor: float) -> Tensor:
        """Forward and backward of a step's micro-batches: gradients become those of factor × the loss summed over all
        tokens of all ranks. Returns this rank's part of that sum, without the factor, as a fp64 scalar."""
        cut = [(self._cut(ids), self._cut(labels)) for ids, labels in micro_batches]
        total = self._pipeline.accumulate(cut, factor) if self._pipeline else self._accumulate(cut, factor)
        self._reduce()
        return total if self._counts_loss else torch.zeros_like(total)

    @torch.no_grad()
    def losses(self, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """This rank's part of the summed loss of each micro-batch, without gradients."""
        cut = [(self._cut(ids), self._cut(labels)) for ids, labels in micro_batches]
        if self._pipeline:
            losses = self._pipeline.losses(cut)
        else:
            (module,) = self.stages.values()
            losses = [module(ids, labels) for ids, labels in cut]
        return [loss if self._counts_loss else torch.zeros_like(loss) for loss in losses]

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the whole gradient, the same fp64 scalar on every rank."""
        ranks, table = self.mesh.stage_ranks, self._tied_table
        return norm_of(
            [
                (p.grad, copies(p.grad, ranks) * (2 if p is table else 1))
                for p in self.parameters()
                if p.grad is not None
            ],
            self.device,
        )

    def scale_gradients(self, factor: float) -> None:
        scale((p.grad for p in self.parameters() if p.grad is not None), factor)

    def drop_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            yield from _inner(stage).named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those that a checkpoint holds."""
        for stage in self.stages.values():
            inner = _inner(stage)
            kept = inner.state_dict().keys()
            yield from ((name, buffer) for name, buffer in inner.named_buffers() if name in kept)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def modules(self) -> Iterator[nn.Module]:
        for stage in self.stages.values():
            yield from _inner(stage).modules()

    def named_blocks(self) -> Iterator[tuple[str, Block]]:
        """This rank's blocks, each with its number among all layers."""
        for stage in self.stages.values():
            yield from _inner(stage).blocks.items()

    def train(self, mode: bool = True) -> None:
        for stage in self.stages.values():
            stage.train(mode)

    def _accumulate(self, micro_batches: list[MicroBatch], factor: float) -> Tensor:
        (module,) = self.stages.values()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (ids, labels) in enumerate(micro_batches, start=1):
            with micro_step(module, self.layout, last=number == len(micro_batches)):
                loss = module(ids, labels)
                (loss * factor).backward()
            total += loss.detach()
        return total

    def _reduce(self) -> None:
        """Sum the gradients that no wrapper summed."""
        layout, mesh = self.layout, self.mesh
        if layout.tp > 1 and layout.zero < 2:
            sum_partial(self.parameters())
        wrapped = all(isinstance(stage, FSDPModule | DistributedDataParallel) for stage in self.stages.values())
        for holders, expert in () if wrapped else ((mesh.weights, False), (mesh.experts, True)):
            if holders is not None and holders["replicate"].size() > 1:
                parameters = [p for p in self.parameters() if is_expert(p) == expert]
                all_reduce_gradients(parameters, holders.get_group("replicate"), self._reduce_dtype)
        if (table := self._tied_table) is not None:
            other = layout.pp - 1 if mesh.coordinate("pp") == 0 else 0
            add_other_copy(table, mesh.weights.get_group("pp"), other)

    @property
    def _tied_table(self) -> nn.Parameter | None:
        """The table that the first and the last stage each hold a copy of, where this rank has one of them."""
        if self._pipeline:
            for stage in self.stages.values():
                if stage.model.tied and stage.embedding is not None:
                    return stage.embedding.weight
        return None

    @property
    def _counts_loss(self) -> bool:
        """Tensor-parallel ranks all compute the same loss; the first of them counts."""
        return self.mesh.coordinate("tp") == 0


def _inner(stage: nn.Module) -> nn.Module:
    return stage.module if isinstance(stage, DistributedDataParallel) else stage
