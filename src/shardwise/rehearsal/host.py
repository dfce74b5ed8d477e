"""Offload where host and device are one: which blocks would live in the host's memory, and what is copied."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from shardwise.parallel import offload
from shardwise.parallel.compat import with_local
from shardwise.rehearsal.tracker import Tracker, local
from shardwise.training import offloaded_optimizer


@contextlib.contextmanager
def two_memories(tracker: Tracker) -> Iterator[None]:
    """Let offloaded activations and optimizer state be copies in either memory, as they are where these are two."""

    class Held(offload._Held):
        def __init__(self, tensor: torch.Tensor, *, strided: bool = False):
            with tracker.labelling("host"):
                super().__init__(tensor, strided=strided)

        def take(self) -> torch.Tensor:
            back = self._back() if self._back else None
            if back is None:
                back = self._place()
                self._back = weakref.ref(back)
            return back

    def moved(value: Any, device: torch.device) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        own = local(value)
        with tracker.labelling("transient" if tracker.kind_of(own) == "host" else "host"):
            copy = torch.empty_like(own)
        return with_local(value, copy) if isinstance(value, DTensor) else copy

    with mock.patch.object(offload, "_Held", Held), mock.patch.object(offloaded_optimizer, "_moved", moved):
        yield
