"""AdamW (arXiv 1711.05101) and SGD over whatever parameters this rank holds."""

from __future__ import annotations

import torch

from shardwise.parallel.module import ParallelModule
from shardwise.spec import Optimizer


def build_optimizer(module: ParallelModule, settings: Optimizer) -> torch.optim.Optimizer:
    """Parameters of two or more dimensions decay, norms and biases do not. AdamW is fused, on CUDA and on CPU."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
