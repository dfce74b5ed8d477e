"""This rank's share of every batch, read one step ahead."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from shardwise.data import MixedOrder, Order, Stream, read_windows
from shardwise.spec import Layout

MicroBatch = tuple[Tensor, Tensor]  # ids, labels: each (micro_batch, S) int64


class Batches:
    """Micro-batches of any step, a pure function of the step, so seeking costs nothing.

    The next step is read by a thread while the device works on this one.
    """

    def __init__(
        self,
        stream: Stream,
        order: Order | MixedOrder,
        layout: Layout,
        data_rank: int,
        vocabulary: int,
        device: torch.device,
    ):
        self._stream, self._order, self._layout = stream, order, layout
        self._data_rank, self._vocabulary, self._device = data_rank, vocabulary, device
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: dict[int, Future[list[MicroBatch]]] = {}

    def take(self, index: int) -> list[MicroBatch]:
        """The micro-batches of step `index` (from 0), on the device. Raises InputError where the data is broken."""
        future = self._ahead.pop(index, None) or self._reader.submit(self._read, index)
        batches = future.result()
        self._ahead = {index + 1: self._reader.submit(self._read, index + 1)}
        return [(self._place(ids), self._place(labels)) for ids, labels in batches]

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, index: int) -> list[MicroBatch]:
        windows = self._order.windows(index)
        share = len(windows) // self._layout.data_ranks
        mine = windows[self._data_rank * share : (self._data_rank + 1) * share]
        ids, labels = read_windows(self._stream, mine, self._order.sequence, self._vocabulary)
        return list(zip(self._cut(ids), self._cut(labels), strict=True))

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _cut(self, array: np.ndarray) -> tuple[Tensor, ...]:
        # Fresh pinned memory each time: a buffer reused under a non-blocking copy would be overwritten too early.
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.split(self._layout.micro_batch)
