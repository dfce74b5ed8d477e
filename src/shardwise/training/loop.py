"""The training loop: a generator of Steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.data import MixedOrder, Order
from shardwise.parallel.module import ParallelModule
from shardwise.spec import Run, Step
from shardwise.training.balance import ExpertBalance
from shardwise.training.batches import Batches, MicroBatch
from shardwise.training.loss_scale import LossScale
from shardwise.training.metrics import Utilisation, peak_memory_gib
from shardwise.training.optimizer import build_optimizer, set_learning_rate
from shardwise.training.schedule import learning_rate


class TrainingError(RuntimeError):
    """Training cannot go on; nothing of the failed step was kept."""


class Trainer:
    """One rank's part of a training run. The same Run gives the same Steps on every layout.

    `wants_stop` is asked after every step on every rank; as soon as one says yes, all end after that same step.
    """

    def __init__(self, run: Run, module: ParallelModule, wants_stop: Callable[[], bool]):
        self.run, self.module, self.device = run, module, module.device
        self.optimizer = build_optimizer(module, run.recipe.optimizer)
        self.loss_scale = LossScale(run.recipe.precision.compute)
        self.stopping = False
        self._wants_stop = wants_stop
        self._balance = ExpertBalance(module, run)
        self._utilisation = Utilisation(run, self.device)

    def steps(self, batches: Batches, order: Order | MixedOrder, done: int) -> Iterator[Step]:
        """Train from step `done` (completed steps) to the Run's last, yielding each finished Step.

        Raises TrainingError at the first loss or gradient that is not finite, before it reaches the weights. In fp16 a
        gradient that overflows skips the update instead, and lowers the loss scale.
        """
        recipe = self.run.recipe
        for index in range(done, recipe.total_steps):
            start = time.perf_counter()
            micro_batches = batches.take(index)
            waited = time.perf_counter() - start

            loss = self._forward_backward(micro_batches, order.targets(index))
            norm = self.module.gradient_norm() / self.loss_scale.value
            loss_value, norm_value = self._agree(loss, norm)
            rate = learning_rate(recipe, index)
            scale = self.loss_scale.value
            finite = math.isfinite(norm_value)
            if finite:
                self._update(norm_value, rate)
            elif not self.loss_scale.dynamic or not math.isfinite(loss_value):
                raise TrainingError(f"step {index + 1}: loss {loss_value}, gradient norm {norm_value}")
            self.loss_scale.update(finite)
            busiest = self._balance.after_step(updated=finite)
            self.module.drop_gradients()

            seconds = time.perf_counter() - start
            speed = recipe.batch_sequences * recipe.sequence / seconds
            yield Step(
                step=index + 1,
                tokens=(index + 1) * recipe.batch_sequences * recipe.sequence,
                loss=loss_value,
                grad_norm=norm_value if finite else None,
                loss_scale=scale if self.loss_scale.dynamic else None,
                lr=rate,
                step_seconds=seconds,
                tokens_per_second=speed,
                **self._utilisation.of(speed),
                peak_memory_gib=peak_memory_gib(self.device),
                busiest_expert=busiest,
                data_wait_fraction=waited / seconds,
            )
            if self.stopping:
                return

    def losses(self, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """This rank's part of the summed loss in nats of each micro-batch, without gradients."""
        with _attention_backends(self.device):
            return self.module.losses(micro_batches)

    def _update(self, norm: float, rate: float) -> None:
        """One optimizer step with the gradient, whose norm is `norm`, clipped and without the loss scale."""
        largest = self.run.recipe.optimizer.clip
        factor = min(1.0, largest / (norm + 1e-6)) if largest > 0 else 1.0
        factor /= self.loss_scale.value
        if factor != 1.0:
            self.module.scale_gradients(factor)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()

    def _forward_backward(self, micro_batches: list[MicroBatch], targets: int) -> Tensor:
        """Gradients of the mean loss times the loss scale; returns this rank's part of the mean loss.

        Here, and nowhere else, gradients are divided: by the number of targets in the global batch. What the ranks
        hold is only summed (`parallel/gradients.py`).
        """
        self._balance.before_step(self.loss_scale.value)
        with _attention_backends(self.device):
            return self.module.accumulate(micro_batches, self.loss_scale.value / targets) / targets

    def _agree(self, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        """The global loss and gradient norm; and whether to stop, in the same all-reduce so that all ranks agree."""
        shared = torch.stack([loss, loss.new_tensor(float(self._wants_stop()))])
        dist.all_reduce(shared)
        loss_value, votes, norm_value = torch.stack([*shared, norm.to(shared.dtype)]).tolist()
        self.stopping = votes > 0
        return loss_value, norm_value


def _attention_backends(device: torch.device):
    """The fastest attention kernel first (BASELINES: cuDNN 468, FA2 276 TFLOP/s on one H200); on a CPU there is one."""
    if device.type != "cuda":
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
