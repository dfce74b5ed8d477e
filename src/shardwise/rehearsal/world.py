"""What has to stand in for the rest of the world where tensors have no values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from shardwise.model.experts import MoE
from shardwise.parallel import apply
from shardwise.parallel.compat import pipeline_without_votes
from shardwise.parallel.expert import AllToAll, Route
from shardwise.rehearsal.replica import Replica


@contextlib.contextmanager
def building() -> Iterator[None]:
    """While the module is built: nothing is materialized (FSDP2 cannot be built in the fake mode), and DDP's reducer is
    replaced."""
    with (
        mock.patch.object(apply, "materialize", lambda *_: None),
        mock.patch.object(apply, "replicate", Replica),
    ):
        yield


@contextlib.contextmanager
def without_values(imbalance: float) -> Iterator[None]:
    """While the step runs: counts that the router would know are given beforehand, and stages do not vote."""

    def send(exchange: AllToAll, rows: Tensor, counts: Tensor) -> tuple[Tensor, Route]:
        ranks = exchange._ranks
        sent = _split(len(rows), ranks)
        received = _split(math.ceil(len(rows) * imbalance), ranks)
        experts = counts.view(ranks, -1).shape[1]
        order = counts.new_empty(sum(received))
        order = order.argsort(stable=True)
        route = Route(sent, received, order, counts.new_empty(experts))
        return all_to_all_single_autograd(rows, received, sent, exchange._group), route

    with mock.patch.object(AllToAll, "send", send), pipeline_without_votes():
        yield


def drop_nothing(modules: Any) -> bool:
    """Let no expert refuse a token, since how many it refuses is known only by value. Whether any would have."""
    dropping = [module for module in modules if isinstance(module, MoE) and module.drops]
    for module in dropping:
        module.drops = False
    return bool(dropping)


def _split(rows: int, parts: int) -> list[int]:
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def to_empty(stages: dict[int, nn.Module], device: torch.device) -> None:
    for stage in stages.values():
        inner = stage.module if isinstance(stage, Replica) else stage
        inner.to_empty(device=device)
