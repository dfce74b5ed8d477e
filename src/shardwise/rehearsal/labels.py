"""Blocks whose part is known from who asked for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from torch import nn

from shardwise.parallel.compat import LeanStage
from shardwise.rehearsal.tracker import Tracker


@contextlib.contextmanager
def received(tracker: Tracker) -> Iterator[None]:
    """What a pipeline stage receives for its forward is kept for its backward; a gradient is temporary."""
    with contextlib.ExitStack() as stack:
        for name, kind in (("get_fwd_recv_ops", "activations"), ("get_bwd_recv_ops", "transient")):
            stack.enter_context(mock.patch.object(LeanStage, name, _labelled(getattr(LeanStage, name), tracker, kind)))
        yield


def accumulated(tracker: Tracker, parameters: Iterable[nn.Parameter]) -> None:
    """What autograd leaves in `grad` are gradients from then on. (FSDP2 has its own way.)"""
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: tracker.relabel([p.grad], "gradients"))


def _labelled(method: Callable[..., Any], tracker: Tracker, kind: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with tracker.labelling(kind):
            return method(*arguments)

    return call
