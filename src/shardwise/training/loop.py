"""The training loop: a generator of Steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.data import MixedOrder, Order
from shardwise.parallel.data import micro_step
from shardwise.spec import Run, Step
from shardwise.training.batches import Batches, MicroBatch
from shardwise.training.gradients import clip_gradients, gradient_norm, scale_gradients
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

    def __init__(self, run: Run, module: nn.Module, device: torch.device, wants_stop: Callable[[], bool]):
        self.run, self.module, self.device = run, module, device
        self.optimizer = build_optimizer(module, run.recipe.optimizer)
        self.loss_scale = LossScale(run.recipe.precision.compute)
        self.stopping = False
        self._wants_stop = wants_stop
        self._utilisation = Utilisation(run, device)

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
            norm = gradient_norm(self.module) / self.loss_scale.value
            loss_value, norm_value = self._agree(loss, norm)
            rate = learning_rate(recipe, index)
            scale = self.loss_scale.value
            finite = math.isfinite(norm_value)
            if finite:
                self._update(norm, rate)
            elif not self.loss_scale.dynamic or not math.isfinite(loss_value):
                raise TrainingError(f"step {index + 1}: loss {loss_value}, gradient norm {norm_value}")
            self.loss_scale.update(finite)
            self.optimizer.zero_grad()

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
                data_wait_fraction=waited / seconds,
            )
            if self.stopping:
                return

    def loss_sum(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Summed loss in nats of one micro-batch: (B, S), (B, S) -> scalar."""
        with _attention_backends(self.device):
            return self.module(ids, labels)

    def _update(self, norm: Tensor, rate: float) -> None:
        """One optimizer step with the clipped gradient, whose norm is `norm`."""
        if self.loss_scale.dynamic:
            scale_gradients(self.module, 1 / self.loss_scale.value)
        clip_gradients(self.module, norm, self.run.recipe.optimizer.clip)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()

    def _forward_backward(self, micro_batches: list[MicroBatch], targets: int) -> Tensor:
        """Gradients of this rank's part of the mean loss, times the loss scale; returns that part of the loss.

        Here, and nowhere else, gradients are divided: by the number of targets in the global batch. What the data
        ranks hold is then only summed (`parallel/data.py`).
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (ids, labels) in enumerate(micro_batches, start=1):
            with micro_step(self.module, self.run.fixed_layout, last=number == len(micro_batches)):
                loss = self.loss_sum(ids, labels) / targets
                (loss * self.loss_scale.value).backward()
            total += loss.detach()
        return total

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
