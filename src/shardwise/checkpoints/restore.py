"""Find a checkpoint that every rank can use, and load it onto whatever layout the state has now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwise.checkpoints.agree import RankFailure, agree, failure_of, gather, reason_of
from shardwise.checkpoints.manifest import Entry, choose, list_checkpoints, verify
from shardwise.checkpoints.state import RNG, flatten, mismatches, refuse
from shardwise.spec import InputError


def find(
    directory: Path, *, say: Callable[[str], None], process_group: dist.ProcessGroup | None = None
) -> Entry | None:
    """`newest_complete` for all ranks together: they share the hashing and get the same answer. Only rank 0 says.

    Called on every rank. Raises InputError on every rank where the directory cannot be read.
    """
    rank, world = (dist.get_rank(process_group), dist.get_world_size(process_group)) if _distributed() else (0, 1)
    try:
        entries = agree(process_group, lambda: list_checkpoints(directory) if rank == 0 else [])[0]
    except RankFailure as failure:
        raise InputError(str(failure)) from None

    def check(entry: Entry) -> str | None:
        return next(filter(None, gather(process_group, verify(entry, rank=rank, world=world))), None)

    return choose(entries, say=say if rank == 0 else lambda _: None, check=check)


def restore(
    path: Path, state: Mapping[str, Any], process_group: dist.ProcessGroup | None = None, *, cast: bool = False
) -> None:
    """Load a checkpoint in place into the tensors of `state`, each rank reading only its own shards.

    `state` is a nested mapping of tensors and DTensors as `state.collect` gives it; its layout may differ from the one
    that was saved. What the checkpoint has beyond it is left alone, and so are generator states (`rng/N`) that it does
    not have. Called on every rank; every tensor must have the saved global shape and dtype. With `cast`, floating-point
    tensors may have another dtype, to which the saved ones are converted.

    Raises InputError on every rank: where the directory holds no readable checkpoint, or naming the tensors that are
    missing or differ (nothing is loaded then); or where a shard is damaged (part of it may be loaded then, so `find` or
    `verify` comes first). Restore only what you trust: the shards' index is a pickle.
    """
    reader = dcp.FileSystemReader(path)
    wanted = flatten(state)
    problem = None
    try:
        index = reader.read_metadata().state_dict_metadata
        found = {key: (m.size, m.properties.dtype) for key, m in index.items() if isinstance(m, TensorStorageMetadata)}
        wanted = {key: tensor for key, tensor in wanted.items() if key in found or not key.startswith(RNG)}
        if cast:
            found = {
                key: (size, wanted[key].dtype if key in wanted and dtype.is_floating_point else dtype)
                for key, (size, dtype) in found.items()
            }
        refuse(str(path), mismatches(wanted, found))
    except InputError as error:
        problem = str(error)
    except Exception as error:  # whatever unpickling a damaged index raises
        problem = f"{path}: its index (.metadata) cannot be read: {reason_of(error)}"
    problem = next(filter(None, gather(process_group, problem)), None)
    if problem:
        raise InputError(problem)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                wanted,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=process_group,
            )
    except CheckpointException as error:
        raise InputError(f"{path}: could not be loaded: {failure_of(error)}") from None


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
