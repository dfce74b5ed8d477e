"""FailureWatch: when one rank fails, all end in seconds, and one message says why."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol, Self, TypeVar

from shardwise.launching.worker import end, tell, watch_launcher
from shardwise.spec import InputError

T = TypeVar("T")

_FAILED = "shardwise/failed"  # "code rank message" of the first failure
_ENDED = "shardwise/ended/{}"  # set by each rank that needs the store no longer

_STORE_SECONDS = 5.0  # the longest the main thread waits for the store
_LINGER_SECONDS = 2.0  # a failing host keeps the store open so long, for the others to read why
_LOST_SECONDS = 5.0  # a rank that lost the store has so long to finish by itself
_LAST_SECONDS = 60.0  # a host that is done waits so long for the others


class Store(Protocol):
    """What is used of torch's TCPStore. `compare_set` and `clone` are used where they exist."""

    def set(self, key: str, value: str, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


class FailureWatch:
    """Ends this process when another rank has failed, even while the main thread is stuck in a collective.

    Rank 0 is taken to host `store`. As a context manager it also covers this rank's own failure: an exception is
    marked for the others and printed, then the process ends with 3 (InputError: 2), without teardown.

    `coordinates` places the rank in the mesh, for messages: "dp_replicate 0, dp_shard 1". `world` is the number of
    ranks; default: WORLD_SIZE of the environment.
    """

    def __init__(
        self, store: Store, rank: int, coordinates: str, *, poll_seconds: float = 0.5, world: int | None = None
    ) -> None:
        # A connection of its own: one that is shared would wait behind the main thread's blocking calls.
        clone: Callable[[], Store] | None = getattr(store, "clone", None)
        self._store = clone() if clone else store
        self._rank = rank
        self._name = f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"
        self._world = world or int(os.environ.get("WORLD_SIZE", "1"))
        self._poll_seconds = poll_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()
        watch_launcher()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            end(self.mark(error))
        self.close()

    def close(self) -> None:
        """Stop watching: this rank has finished well.

        The host waits here until every rank has closed, so that none of them takes its end for a failure; meanwhile
        it still watches. A rank that loses the store just before it closes gets a few seconds to do so.
        """
        if self._rank == 0:
            self._wait_for_others(_LAST_SECONDS)
        else:
            self._set_ended()
        self._closed.set()
        self._thread.join(_STORE_SECONDS)

    def mark(self, error: BaseException) -> int:
        """Tell the other ranks that this one failed, print why, and return the exit code to end with.

        Only the first failure is printed: what fails after it is nearly always its consequence, and takes over its
        exit code. On the host it returns once the others have read the mark, or after 2 s.
        """
        self._closed.set()
        code = 2 if isinstance(error, InputError) else 3
        reason = (str(error).strip() or "no message").splitlines()[0].encode("utf-8", "replace").decode()
        line = f"{self._name} failed: {type(error).__name__}: {reason}"
        mine = f"{code} {self._rank} {line}"
        first = _within(_STORE_SECONDS, lambda: self._set_first(mine))
        if first is None:
            # Then the host is gone, this error is probably how it shows here, and every rank has one: no traceback.
            tell(f"{line} (and contact with the other ranks is lost)")
            return code
        if first != mine:
            self._leave()
            return int(first.split()[0])
        if code == 2:
            tell(f"error: {error}")
        else:
            tell("".join(traceback.format_exception(error)) + line)
        self._leave()
        return code

    def _leave(self) -> None:
        if self._rank == 0:
            self._wait_for_others(_LINGER_SECONDS)
        else:
            self._set_ended()

    def _set_first(self, mine: str) -> str:
        compare_set: Callable[[str, str, str], bytes] | None = getattr(self._store, "compare_set", None)
        if compare_set:
            return compare_set(_FAILED, "", mine).decode()
        if not self._store.check([_FAILED]):
            self._store.set(_FAILED, mine)
        return self._store.get(_FAILED).decode()

    def _set_ended(self) -> None:
        _within(_STORE_SECONDS, lambda: self._store.set(_ENDED.format(self._rank), "1"))

    def _wait_for_others(self, seconds: float) -> None:
        others = [_ENDED.format(rank) for rank in range(self._world) if rank != self._rank]
        deadline = time.monotonic() + seconds
        while others and time.monotonic() < deadline and not _within(_STORE_SECONDS, lambda: self._store.check(others)):
            time.sleep(0.05)

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_seconds):
            try:
                first = self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else ""
            except Exception:  # the store's own error types live in torch
                if self._closed.wait(_LOST_SECONDS):
                    return
                if self._rank == 1:  # one rank speaks for all that are left
                    tell("contact with the other ranks is lost; ending all ranks")
                end(3)
            if first and not self._closed.is_set():
                self._follow(first)

    def _follow(self, first: str) -> None:
        """End as the first failing rank did. Its message is repeated only where it was printed on another node."""
        code, rank, line = first.split(maxsplit=2)
        if self._rank == 0 and int(rank) >= int(os.environ.get("LOCAL_WORLD_SIZE", str(self._world))):
            tell(line)
        self._set_ended()
        end(int(code))


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """The call's result; None where it raises or takes longer, because the store is gone or its host is silent."""
    result: list[T] = []

    def run() -> None:
        try:
            result.append(call())
        except Exception:  # the store's own error types live in torch
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None
