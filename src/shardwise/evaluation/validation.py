"""Validation loss: a sum over a fixed set of held-out tokens divided by their number, at any world size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data import Data, read_windows, validation_windows
from shardwise.model.loss import IGNORED

_STOP_POLL = 8  # micro-batches between two questions whether to give up


@dataclass(frozen=True)
class Validation:
    """`loss` in nats per token; `bits_per_byte` of the text that the targets stand for."""

    step: int
    loss: float
    bits_per_byte: float
    tokens: int  # targets that were scored

    def dump(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def validate(
    module: nn.Module,
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    data: Data,
    *,
    step: int,
    sequence: int,
    tokens: int,
    micro_batch: int,
    data_rank: int,
    data_ranks: int,
    vocabulary: int,
    device: torch.device,
    wants_stop: Callable[[], bool],
) -> Validation | None:
    """Score the first `tokens` of the validation split. None where a rank wants to stop before the end.

    loss_sum: (ids, labels) of one micro-batch -> summed loss. Every rank runs the same number of micro-batches, as
    FSDP2's collectives require; the last are padded with windows that have no targets.
    """
    windows = validation_windows(data.validation.tokens, sequence, tokens)
    rounds = math.ceil(len(windows) / (data_ranks * micro_batch))
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # nats, targets, bytes
    module.eval()
    try:
        for index in range(rounds):
            if index % _STOP_POLL == 0 and _any(wants_stop(), device):
                return None
            first = (index * data_ranks + data_rank) * micro_batch
            ids, labels = _read(data, windows[first : first + micro_batch], sequence, micro_batch, vocabulary)
            targets = labels[labels != IGNORED]
            sums[0] += loss_sum(torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device))
            sums[1] += len(targets)
            sums[2] += int(data.token_bytes[targets].sum())
    finally:
        module.train()
    dist.all_reduce(sums)
    nats, count, size = sums.tolist()
    return Validation(step, nats / count, nats / math.log(2) / size, int(count))


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
