"""Checkpoints one tensor at a time, for models that do not fit into host memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardwise.checkpoints.agree import reason_of, system_error
from shardwise.checkpoints.manifest import describe_file, write_manifest
from shardwise.checkpoints.save import versions
from shardwise.spec import Checkpoint, InputError

_ALONE = "torch.distributed is disabled"  # a warning of dcp


class TensorReader:
    """Tensors of a checkpoint, whatever layout saved it: `shapes` by name ('model.norm.weight'), and `load`.

    Raises InputError where the index is damaged. Read only what you trust: the index is a pickle.
    """

    def __init__(self, path: Path):
        self._path, self._reader = path, _Reader(path)
        try:
            entries = self._reader.read_metadata().state_dict_metadata
        except Exception as error:  # whatever unpickling a damaged index raises
            raise InputError(f"{path}: its index (.metadata) cannot be read: {reason_of(error)}") from None
        self._forms = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.shapes = {name: size for name, (size, _) in self._forms.items()}

    def load(self, name: str) -> Tensor:
        """The whole tensor on the CPU, in the dtype that was saved. Raises InputError where a shard is damaged."""
        shape, dtype = self._forms[name]
        tensor = torch.empty(shape, dtype=dtype)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_ALONE)
                planner = DefaultLoadPlanner(flatten_state_dict=False)
                dcp.load({name: tensor}, storage_reader=self._reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            reason = reason_of(error.failures[0][0])
            raise InputError(f"{self._path}: {name} could not be loaded: {reason}") from None
        return tensor


def write_weights_only(
    path: Path, shapes: Mapping[str, Size], load: Callable[[str], Tensor], *, run: dict[str, Any], extra: list[Path]
) -> None:
    """Commit a checkpoint of step 0 without optimizer state: fp32 tensors that `load` gives by name, one at a time.

    `path` is a directory of that step's name that holds nothing but `extra`, files that belong to the checkpoint, too.
    Raises OSError, and what `load` raises.
    """
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    # A file per tensor: within one file, the writer keeps every tensor that it has written.
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False, thread_count=1, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ALONE)
            dcp.save(state, storage_writer=writer, planner=_Planner(load), no_dist=True)
    except CheckpointException as error:
        failure = error.failures[0][0]
        raise system_error(failure) or failure from None
    written = [*path.glob("__0_*"), path / ".metadata", *extra]
    files = tuple(describe_file(file) for file in sorted(written))
    checkpoint = Checkpoint(step=0, tokens=0, world=1, files=files, run=run, data="", versions=versions())
    write_manifest(path, checkpoint)


class _Reader(dcp.FileSystemReader):
    """Unpickles the index once, not for every tensor."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            self._index = super().read_metadata(*args, **kwargs)
        return self._index


class _Planner(DefaultSavePlanner):
    """Plans with the shapes of meta tensors, and asks for each tensor when it is written."""

    def __init__(self, load: Callable[[str], Tensor]):
        super().__init__(flatten_state_dict=False)
        self._load = load

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._load(index.fqn).to(torch.float32)
