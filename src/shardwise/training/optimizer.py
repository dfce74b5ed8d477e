"""AdamW (arXiv 1711.05101) and SGD over whatever parameters this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.parallel.module import ParallelModule
from shardwise.spec import Optimizer
from shardwise.training.offloaded_optimizer import OffloadedOptimizer
from shardwise.training.sharded_optimizer import ShardedOptimizer

Optim = torch.optim.Optimizer | OffloadedOptimizer | ShardedOptimizer


def build_optimizer(module: ParallelModule, settings: Optimizer) -> Optim:
    """As the module's layout wants it: with its state shared out (zero 1), on the CPU (offload optimizer), or plain."""

    def build(named: list[tuple[str, nn.Parameter]]) -> Any:
        optimizer = plain_optimizer(named, settings)
        return OffloadedOptimizer(optimizer) if module.layout.offload == "optimizer" else optimizer

    if module.layout.zero == 1:
        return ShardedOptimizer(module, build)
    return build(list(module.named_parameters()))


def plain_optimizer(named: list[tuple[str, nn.Parameter]], settings: Optimizer) -> torch.optim.Optimizer:
    """Parameters of two or more dimensions decay, norms and biases do not. AdamW is fused, on CUDA and on CPU.

    `param_names` of a group are the names of its parameters. No kernel takes parameters of different meshes at once.
    """
    groups: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim >= 2, mesh), []).append((name, parameter))
    options = [
        {"params": group, "weight_decay": settings.weight_decay if decays else 0.0}
        for (decays, _), group in groups.items()
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(options, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(options, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def set_learning_rate(optimizer: Optim, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
