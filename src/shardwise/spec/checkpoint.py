"""Checkpoint: the manifest of one saved state. A directory without one is not a checkpoint."""

from __future__ import annotations

from typing import Any

from shardwise.spec.noun import Noun
from shardwise.spec.numbers import CountOrZero


class CheckpointFile(Noun):
    """One file of a checkpoint, relative to its directory."""

    name: str
    bytes: CountOrZero
    sha256: str


class Checkpoint(Noun):
    """Manifest, written last. `run` is the Run that saved it; `data` identifies the token shards it was reading."""

    step: CountOrZero
    tokens: CountOrZero
    world: CountOrZero
    files: tuple[CheckpointFile, ...]
    run: dict[str, Any]
    data: str
    versions: dict[str, str]
