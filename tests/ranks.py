"""Pools of gloo ranks: forked once a session, reused by every test that needs several ranks."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # functional collectives import it; once here instead of once in every rank
import torch.distributed as dist

_SECONDS = 120


class RankPool:
    """`world` processes with one default gloo group. `run(function, …)` calls it on every rank at once."""

    def __init__(self, world: int):
        self._world = world
        self._start()

    def _start(self) -> None:
        world = self._world
        self._store = tempfile.NamedTemporaryFile(prefix="shardwise-ranks-")  # noqa: SIM115 lives as long as the pool
        Path(self._store.name).unlink()
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(world)]
        self._ends = [here for here, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(there, rank, world, self._store.name), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results in rank order. Raises AssertionError with the first failing rank's traceback; the ranks, which
        may then be in the middle of anything, are replaced by new ones."""
        try:
            return self._run(function, arguments)
        except AssertionError:
            self.close()
            self._start()
            raise

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        for end in self._ends:
            end.send((function, arguments))
        answers: list[tuple[bool, Any]] = []
        for rank, end in enumerate(self._ends):
            deadline = time.monotonic() + _SECONDS
            while not end.poll(0.2):
                assert self._processes[rank].is_alive(), f"rank {rank} died"
                assert time.monotonic() < deadline, f"rank {rank} did not answer within {_SECONDS} s"
            answers.append(end.recv())
        for rank, (good, answer) in enumerate(answers):
            if not good:
                raise AssertionError(f"rank {rank}:\n{answer}")
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def _serve(end: Any, rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while True:
        function, arguments = end.recv()
        try:
            end.send((True, function(*arguments)))
        except BaseException:
            end.send((False, traceback.format_exc()))
