"""What has to stand in for the rest of the world where tensors have no values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from shardwise.model.experts import MoE
from shardwise.model.router import Router
from shardwise.parallel import apply
from shardwise.parallel.compat import LeanStage, pipeline_without_votes
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


@contextlib.contextmanager
def even_routing(imbalance: float) -> Iterator[None]:
    """On a GPU, where weights that nobody else sent make no sense: tokens go to all experts in turn, whatever their
    scores, and this rank's experts receive `imbalance` times as many."""
    choose, exchange = Router._choose, dist.all_to_all_single

    def even(router: Router, scores: Tensor) -> Tensor:
        chosen = choose(router, scores)
        count = scores.shape[-1]
        return torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape).remainder_(count)

    def counts(mine: Tensor, theirs: Tensor, *arguments: Any, **named: Any) -> Any:
        work = exchange(mine, theirs, *arguments, **named)
        if imbalance > 1:
            mine.copy_((theirs * imbalance).ceil())
        return work

    with mock.patch.object(Router, "_choose", even), mock.patch.object(dist, "all_to_all_single", counts):
        yield


@contextlib.contextmanager
def received_at_random() -> Iterator[None]:
    """On a GPU, where a pipeline's stage receives nothing: random numbers, since products of zeros are faster."""

    def filled(method: Any) -> Any:
        def receive(stage: LeanStage, chunk: int) -> list[Any]:
            operations = method(stage, chunk)
            for operation in operations:
                operation.tensor.detach().normal_()
            return list(operations)

        return receive

    with contextlib.ExitStack() as stack:
        for name in ("get_fwd_recv_ops", "get_bwd_recv_ops"):
            stack.enter_context(mock.patch.object(LeanStage, name, filled(getattr(LeanStage, name))))
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
