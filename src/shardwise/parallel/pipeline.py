"""Pipeline parallelism: consecutive layers on each of pp ranks, through which the micro-batches of a step flow.

What it shards: the layers, in stages of equal predicted cost (`planner/stages.py`). What it communicates: the hidden
states of every micro-batch from stage to stage, and their gradients back. When is the schedule's matter
(`planner/schedules.py` has their order and sources); PyTorch's `torch.distributed.pipelining` runs it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from shardwise.parallel.compat import SPLITS_CUSTOM_OPERATORS, LeanStage
from shardwise.parallel.mesh import Mesh
from shardwise.planner.schedules import stages_of
from shardwise.spec import InputError, Layout
from shardwise.spec.combinations import SPLIT_BACKWARD

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI = {
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Pipeline:
    """This rank's stages (by number) and what they send to and receive from those of the other ranks.

    Shapes are known beforehand, so nothing but hidden states and their gradients is exchanged. The last stage computes
    the summed loss itself.
    """

    def __init__(self, layout: Layout, mesh: Mesh, stages: dict[int, nn.Module], sequence: int, device: torch.device):
        self._layout, self._modules, self._device = layout, stages, device
        _require_split_backward(layout, next(iter(stages.values())))
        self._group = mesh.weights.get_group("pp")
        self._count = layout.pp * layout.virtual_stages
        self._rank_of = {
            stage: rank
            for rank in range(layout.pp)
            for stage in stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank)
        }
        self._stages = [self._stage(number, module, sequence) for number, module in stages.items()]
        self._schedule: Any = None
        self._micro_batches = 0
        self._factor, self._total = 1.0, torch.zeros(())

    @property
    def _has_head(self) -> bool:
        return self._count - 1 in self._modules

    def accumulate(self, micro_batches: list[tuple[Tensor, Tensor]], factor: float) -> Tensor:
        """Forward and backward of (ids, labels), each (micro_batch, S / cp): gradients of factor × the summed loss.
        Returns that sum, without the factor, as a fp64 scalar; 0 on ranks without the head."""
        if self._micro_batches != len(micro_batches):
            self._schedule, self._micro_batches = self._build(len(micro_batches)), len(micro_batches)
        self._factor, self._total = factor, torch.zeros((), dtype=torch.float64, device=self._device)
        ids = [torch.cat([ids for ids, _ in micro_batches])] if 0 in self._modules else []
        named: dict[str, Any] = {}
        if self._has_head:
            labels = torch.cat([labels for _, labels in micro_batches])
            named = {"labels": labels, "target": labels}
        self._schedule.step(*ids, **named, return_outputs=False)
        return self._total

    def losses(self, micro_batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The summed loss of each of any number of (ids, labels), without gradients; zeros on ranks without the head.

        All ranks go through the same list of (stage, micro-batch): each computes what is its own, and sends its outputs
        when it is the next stage's turn. So any two ranks send and receive in the same order and never wait for each
        other.
        """
        last = self._count - 1
        losses = [torch.zeros((), device=self._device) for _ in micro_batches]
        outputs: dict[tuple[int, int], Tensor] = {}
        sent: list[tuple[Any, Tensor]] = []
        turns = {
            (stage, number)
            for own in self._modules
            for stage in (own, min(own + 1, last))
            for number in range(len(micro_batches))
        }
        for stage, number in sorted(turns, key=lambda turn: (turn[0] // self._layout.pp, turn[1], turn[0])):
            ids, labels = micro_batches[number]
            if stage not in self._modules:
                x = outputs.pop((stage - 1, number)).contiguous()
                sent.append((dist.isend(x, group=self._group, group_dst=self._rank_of[stage]), x))
                continue
            if stage == 0:
                x = ids
            elif stage - 1 in self._modules:
                x = outputs.pop((stage - 1, number))
            else:
                x = self._hidden(self._modules[stage], len(ids), ids.shape[1], self._device)
                dist.recv(x, group=self._group, group_src=self._rank_of[stage - 1])
            if stage == last:
                losses[number] = self._modules[stage](x, labels)
            else:
                outputs[stage, number] = self._modules[stage](x)
        for work, _ in sent:
            work.wait()
        return losses

    def _build(self, micro_batches: int) -> Any:
        name, options = self._layout.schedule, {"loss_fn": self._loss, "scale_grads": False}
        if name in _SINGLE:
            (stage,) = self._stages
            return _SINGLE[name](stage, micro_batches, **options)
        return _MULTI[name](self._stages, micro_batches, **options)

    def _loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """What the backward of a micro-batch starts from."""
        self._total += loss.detach()
        return loss * self._factor

    def _stage(self, number: int, module: nn.Module, sequence: int) -> LeanStage:
        rows, length = self._layout.micro_batch, sequence // self._layout.cp
        wide = torch.promote_types(module.compute_dtype, torch.float32)
        hidden = self._hidden(module, rows, length, "meta").requires_grad_()
        return LeanStage(
            module,
            number,
            self._count,
            self._device,
            input_args=torch.empty(rows, length, dtype=torch.int64, device="meta") if number == 0 else hidden,
            output_args=torch.empty((), dtype=wide, device="meta") if number == self._count - 1 else hidden,
            group=self._group,
        )

    def _hidden(self, module: nn.Module, rows: int, length: int, device: torch.device | str) -> Tensor:
        """Hidden states between two stages: (B, S / cp / tp, hidden)."""
        shape = (rows, length // self._layout.tp, module.model.hidden)
        return torch.empty(shape, dtype=module.compute_dtype, device=device)


def _require_split_backward(layout: Layout, module: Any) -> None:
    """Raise InputError where this torch cannot compute the gradients of inputs and weights apart."""
    looped = module.model.experts is not None and module.compute_dtype != torch.bfloat16
    if looped and layout.schedule in SPLIT_BACKWARD and not SPLITS_CUSTOM_OPERATORS:
        raise InputError(
            f"layout.schedule {layout.schedule}: torch {torch.__version__} cannot split the backward of experts in "
            f"{str(module.compute_dtype).removeprefix('torch.')}; what works: precision bf16, schedule 1f1b or "
            "interleaved, or torch 2.13"
        )
