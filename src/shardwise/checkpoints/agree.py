"""What goes wrong on one rank, every rank learns, so that all of them go on the same way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


class RankFailure(Exception):
    """Something failed on some rank; every rank gets the same text: 'No space left on device (rank 1)'."""

    def __init__(self, reason: str, rank: int) -> None:
        super().__init__(f"{reason} (rank {rank})")


def gather(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. Without a process group, just the one."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank and return all results in rank order.

    Raises RankFailure on every rank where it raised on any of them. `work` must not use `group` itself.
    """
    result: T | None = None
    reason: str | None = None
    try:
        result = work()
    except Exception as error:
        reason = reason_of(error)
    outcomes = gather(group, (result, reason))
    for rank, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise RankFailure(reason, rank)
    return [outcome for outcome, _ in outcomes]  # type: ignore[misc]


def failure_of(error: CheckpointException) -> RankFailure:
    """The first of the failures that torch.distributed.checkpoint gathered from all ranks."""
    rank = min(error.failures)
    return RankFailure(reason_of(error.failures[rank][0]), rank)


def reason_of(error: BaseException) -> str:
    """One plain line, in the operating system's own words where it was the cause."""
    cause = system_error(error)
    if cause is not None:
        return f"{cause.strerror}: {cause.filename}" if cause.filename else str(cause.strerror)
    first_line = next(iter(str(error).strip().splitlines()), "")
    first_line = re.sub(r"^\[\S+:\d+\] ", "", first_line)  # gloo begins with its source file and line
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def system_error(error: BaseException | None) -> OSError | None:
    """The operating system's error at the bottom of a chain: torch.save hides a full disk behind a RuntimeError."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        error = error.__cause__ or error.__context__
    return None
