"""Each rank in a process of its own: a process group has one life in a process."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
import torch._dynamo  # imported here once, not in every child
import torch.testing._internal.distributed.fake_pg

import shardwise.training.loop  # noqa: F401

AT_ONCE = 2


def in_children(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], at_once: int = AT_ONCE
) -> Iterator[Any]:
    """function(*call) for each call, in order, each in a forked process of its own, `at_once` at a time.

    What a child raises is raised here. Raises RuntimeError for one that was killed, as for want of memory.
    """
    waiting, running = list(calls), list[tuple[ProcessPoolExecutor, Future[Any]]]()
    context = multiprocessing.get_context("fork")
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                pool = ProcessPoolExecutor(1, mp_context=context, initializer=_settle)
                running.append((pool, pool.submit(function, *waiting.pop(0))))
            pool, future = running.pop(0)
            try:
                yield future.result()
            except BrokenProcessPool:
                raise RuntimeError("a rehearsal was killed; perhaps this machine has too little memory") from None
            finally:
                pool.shutdown()
    finally:
        for pool, _ in running:
            pool.shutdown(cancel_futures=True)


def _settle() -> None:
    """Few threads, since there is nothing to compute; no advice of the compiler's, and none of its past."""
    torch._dynamo.reset()
    torch._logging.set_logs(all=logging.ERROR)
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "OFF")
    torch.set_num_threads(1)
