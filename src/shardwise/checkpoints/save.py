"""Save without stopping training, and commit only what is whole.

Every rank writes its shards, hashes what it wrote, and rank 0 writes the manifest last. A checkpoint therefore exists
whole or not at all, whatever is killed or runs full on the way.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import platform
import threading
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from shardwise.checkpoints.agree import RankFailure, agree, failure_of, reason_of, system_error
from shardwise.checkpoints.manifest import (
    describe_file,
    inspect,
    list_checkpoints,
    remove,
    remove_old,
    step_name,
    verify,
    write_manifest,
)
from shardwise.checkpoints.state import flatten
from shardwise.spec import Checkpoint, CheckpointFile, InputError

# A run of one process needs no process group; torch warns about that at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Checkpointer:
    """Saves the state of a run into `directory`, one `step-N` directory each, and keeps the newest `keep`.

    Created on every rank, after `init_process_group` where there is one: it makes a gloo group of its own, so that its
    traffic never mixes with that of training. `directory` must be one that all ranks see, on all nodes; a run whose
    nodes share no file system cannot save (its first save fails, and says so).

    With `asynchronous`, `save` only copies the state to host memory (on CUDA into pinned buffers that are kept for the
    next save), and a thread does the rest. A failed save never stops training: `last_error` says why the latest one
    failed, `say` is told once, on rank 0 and maybe from that thread, and earlier checkpoints stay as they are. Ranks
    wait for each other at most `timeout` seconds, and for storage a quarter longer. If they lose touch or storage hangs
    (which the rank that sees it says), nothing more is saved.

    Raises InputError on every rank where rank 0 cannot write in `directory`.
    """

    def __init__(
        self, directory: Path, *, keep: int, asynchronous: bool, say: Callable[[str], None], timeout: float = 1800.0
    ) -> None:
        self.last_error: str | None = None
        self._directory, self._keep, self._say, self._timeout = directory, keep, say, timeout
        self._group: dist.ProcessGroup | None = None
        self._rank, self._world = 0, 1
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
        try:
            agree(self._group, self._probe)
        except RankFailure as failure:
            raise InputError(f"{directory}: checkpoints cannot be written there: {failure}") from None
        self._asynchronous = asynchronous
        self._stager: BlockingAsyncStager | None = None
        self._thread: threading.Thread | None = None
        self._broken: str | None = None  # why nothing more can be saved
        self._saved: Path | None = None  # written by this object, hence known to be good
        # The thread must not keep a process alive for ever, nor be cut off when training ends with an error.
        atexit.register(self.wait)

    def save(self, step: int, state: Mapping[str, Any], *, tokens: int, run: dict[str, Any], data: str) -> None:
        """Save `state` (nested tensors, as `state.collect` gives it) of `step`. Called on every rank.

        Waits for the save before it. Where a good checkpoint of this step is there already, nothing is written; an
        incomplete or damaged one is replaced. `tokens` trained on so far, `run` and the fingerprint `data` of the token
        shards go into the manifest. Failures of storage are reported as the class says, not raised; TypeError is raised
        for a state that holds anything but tensors.
        """
        self.wait()
        manifest = Checkpoint(
            step=step, tokens=tokens, world=self._world, files=(), run=run, data=data, versions=versions()
        )
        tensors = flatten(state)
        if self._broken:
            self._report(step, self._broken)
            return
        if not self._asynchronous:
            self._save(manifest, state, None)
            return
        staged: Any = {}
        problem = None
        try:
            if self._stager is None:
                # Not DefaultStager: torch 2.11 closes it after one use. Buffers are pinned where they are kept.
                cuda = any(tensor.is_cuda for tensor in tensors.values())
                self._stager = BlockingAsyncStager(cache_staged_state_dict=cuda)
            staged = self._stager.stage(dict(state))
        except Exception as error:  # such as no host memory; the other ranks must learn of it
            problem, self._stager = error, None
        self._thread = threading.Thread(
            target=self._save, args=(manifest, staged, problem), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the pending save, if any. Its outcome is in `last_error`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(1.25 * self._timeout)  # a rank that waits for another gives up first, and says more
        if thread.is_alive():
            self._broken = f"an earlier save still hangs after {1.25 * self._timeout:g} seconds"
            self.last_error = f"checkpoints are no longer saved: {self._broken} (rank {self._rank})"
            self._say(self.last_error)

    def close(self) -> None:
        """Wait for the pending save and give the process group back. Called on every rank; no save may follow."""
        self.wait()
        atexit.unregister(self.wait)
        if self._group is not None and not self._broken:
            dist.destroy_process_group(self._group)
        self._group, self._broken = None, "the checkpointer is closed"

    def _save(self, manifest: Checkpoint, state: Mapping[str, Any], problem: Exception | None) -> None:
        step = manifest.step
        path = self._directory / step_name(step)
        try:
            if self._prepare(path, problem):
                self._write(path, state)
                files = agree(self._group, lambda: self._written(path))
                agree(self._group, lambda: self._commit(path, manifest, [file for part in files for file in part]))
        except RankFailure as failure:
            self._discard(path)
            self._report(step, str(failure))
        except Exception as error:  # only the group's own failures come here: a rank died, or timed out
            self._broken = f"the ranks lost touch with each other ({reason_of(error)})"
            self._discard(path)
            self._report(step, self._broken)
        else:
            self.last_error = None
            self._saved = path
            self._retire()

    def _prepare(self, path: Path, problem: Exception | None) -> bool:
        """Make an empty directory, and return whether there is anything to write."""

        def look() -> Any:
            if problem is not None:
                raise problem
            return inspect(path) if self._rank == 0 and path.exists() else None

        entry = agree(self._group, look)[0]
        if entry is not None and entry.reason is None:
            if path == self._saved:
                return False
            reasons = agree(self._group, lambda: verify(entry, rank=self._rank, world=self._world))
            if not any(reasons):
                return False

        def clear() -> None:
            if self._rank == 0:
                if entry is not None:
                    remove(path)
                path.mkdir(parents=True)

        agree(self._group, clear)
        return True

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        # A staged state is on the CPU. Copying ahead would only open a CUDA context on device 0, in every process.
        ahead = 0 if self._asynchronous else 10_000_000
        writer = _Writer(path, thread_count=1, per_thread_copy_ahead=ahead, overwrite=False)
        try:
            dcp.save(dict(state), storage_writer=writer, process_group=self._group)
        except CheckpointException as error:  # raised on every rank where any of them failed
            raise failure_of(error) from None

    def _written(self, path: Path) -> list[CheckpointFile]:
        """What this rank wrote: its shards, and on rank 0 their index."""
        names = [file for file in path.iterdir() if file.name.startswith(f"__{self._rank}_")]
        return [describe_file(file) for file in names + [path / ".metadata"] * (self._rank == 0)]

    def _commit(self, path: Path, manifest: Checkpoint, files: list[CheckpointFile]) -> None:
        if self._rank != 0:
            return
        for file in files:
            if not (path / file.name).exists():
                raise FileNotFoundError(2, "not visible here; every rank must see the same directory", file.name)
        files = sorted(files, key=lambda file: file.name)
        write_manifest(path, manifest.model_copy(update={"files": tuple(files)}))

    def _discard(self, path: Path) -> None:
        """Free the space of a failed save, unless its manifest was written before the failure."""
        if self._rank == 0:
            with contextlib.suppress(OSError):
                if inspect(path).reason is not None:
                    remove(path)

    def _retire(self) -> None:
        if self._rank == 0:
            try:
                remove_old(self._directory, self._keep)
            except (OSError, InputError) as error:
                self._say(f"old checkpoints could not be removed: {reason_of(error)}")

    def _report(self, step: int, reason: str) -> None:
        self.last_error = f"checkpoint of step {step} was not saved: {reason}"
        if self._rank == 0:
            good = None
            with contextlib.suppress(InputError):
                good = next((entry for entry in list_checkpoints(self._directory) if entry.reason is None), None)
            last = f"The last good one is {good.path.name}." if good else "There is no good one before it."
            self._say(f"{self.last_error}. {last}")

    def _probe(self) -> None:
        if self._keep < 1:
            raise ValueError(f"keep is {self._keep}; nearest: 1")
        if self._rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._directory / ".writable"
            probe.touch()
            probe.unlink()


def versions() -> dict[str, str]:
    """What wrote a checkpoint, for its manifest."""
    try:
        shardwise = importlib.metadata.version("shardwise")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        shardwise = "unknown"
    return {"shardwise": shardwise, "torch": torch.__version__, "python": platform.python_version()}


class _Writer(dcp.FileSystemWriter):
    """Raises the operating system's error itself: only the outermost one survives the way to the other ranks."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause = system_error(error)
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, cause.filename) from None
