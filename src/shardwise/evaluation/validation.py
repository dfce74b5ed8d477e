"""Validation loss: a sum over a fixed set of held-out tokens divided by their number, at any world size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data import Data, read_windows, validation_parts
from shardwise.model.loss import IGNORED

_TOGETHER = 8  # micro-batches that a pipeline gets at once; before them, ranks ask each other whether to stop


@dataclass(frozen=True)
class Validation:
    """`loss` in nats per token; `bits_per_byte` of the text that the targets stand for, None where that is unknown."""

    step: int
    loss: float
    bits_per_byte: float | None
    tokens: int  # targets that were scored
    losses: dict[str, float] = field(default_factory=dict)  # of each source of a mixture

    @property
    def bits_text(self) -> str:
        """For people."""
        return "unknown" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}"

    def dump(self) -> dict[str, Any]:
        """Plain numbers; the loss of a source is `loss/SOURCE`."""
        record = {"step": self.step, "loss": self.loss, "bits_per_byte": self.bits_per_byte, "tokens": self.tokens}
        return record | {f"loss/{name}": loss for name, loss in self.losses.items()}


class Trainable(Protocol):
    """What `validate` needs of a model."""

    def train(self, mode: bool) -> Any: ...


@torch.no_grad()
def validate(
    module: Trainable,
    losses: Callable[[list[tuple[Tensor, Tensor]]], list[Tensor]],
    data: Data,
    *,
    step: int,
    sequence: int,
    tokens: int,
    micro_batch: int,
    data_rank: int,
    data_ranks: int,
    counts: bool,
    vocabulary: int,
    device: torch.device,
    wants_stop: Callable[[], bool],
) -> Validation | None:
    """Score the first `tokens` of the validation split; of a mixture, each source's share of them (`validation_parts`).
    None where a rank wants to stop before the end.

    losses: (ids, labels) of some micro-batches -> this rank's part of the summed loss of each. Every rank runs the same
    number of micro-batches, as collectives require; the last are padded with windows that have no targets. counts:
    whether this is the one of the ranks that read the same windows which counts their targets.
    """
    parts = validation_parts(data.validation, sequence, tokens)
    text = data.token_bytes
    if text is not None:
        vocabulary = min(vocabulary, len(text))
    sums = torch.zeros(len(parts), 3, dtype=torch.float64, device=device)  # nats, targets, bytes of each source
    rounds = [
        (source, windows[first : first + data_ranks * micro_batch])
        for source, (_, windows) in enumerate(parts)
        for first in range(0, len(windows), data_ranks * micro_batch)
    ]
    module.train(False)
    try:
        for first in range(0, len(rounds), _TOGETHER):
            if _any(wants_stop(), device):
                return None
            batches = []
            for source, windows in rounds[first : first + _TOGETHER]:
                mine = windows[data_rank * micro_batch : (data_rank + 1) * micro_batch]
                ids, labels = _read(data, mine, sequence, micro_batch, vocabulary)
                batches.append((torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)))
                if counts:
                    targets = labels[labels != IGNORED]
                    sums[source, 1] += len(targets)
                    sums[source, 2] += math.nan if text is None else int(text[targets].sum())
            for (source, _), loss in zip(rounds[first : first + _TOGETHER], losses(batches), strict=True):
                sums[source, 0] += loss
    finally:
        module.train(True)
    dist.all_reduce(sums)
    nats, count, size = sums.sum(dim=0).tolist()
    losses = {name: nats / count for (name, _), (nats, count, _) in zip(parts, sums.tolist(), strict=True) if name}
    bits = None if math.isnan(size) else nats / math.log(2) / size
    return Validation(step, nats / count, bits, int(count), losses)


def _read(data: Data, windows: np.ndarray, sequence: int, rows: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and labels (rows, sequence); rows without a window have no targets."""
    ids = np.zeros((rows, sequence), dtype=np.int64)
    labels = np.full((rows, sequence), IGNORED, dtype=np.int64)
    if len(windows):
        ids[: len(windows)], labels[: len(windows)] = read_windows(data.validation, windows, sequence, vocabulary)
    return ids, labels


def _any(flag: bool, device: torch.device) -> bool:
    votes = torch.tensor(float(flag), device=device)
    dist.all_reduce(votes)
    return votes.item() > 0
