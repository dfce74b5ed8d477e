"""Data that is always there: the source text of Python's own standard library, as bytes, prepared once into a cache."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from shardwise.data.documents import Options
from shardwise.data.index import FORMAT, INDEX
from shardwise.data.output import UnwritableError
from shardwise.data.prepare import prepare_sources
from shardwise.data.shards import Weighted
from shardwise.data.sources import Sources
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.spec import InputError
from shardwise.spec.noun import nearest
from shardwise.spec.recipe import Source

_LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_VALIDATION_FRACTION = 0.05


def resolve_data(data: str | Sequence[Source]) -> Path | tuple[Weighted, ...]:
    """What `recipe.data` means, for `open_data`: `builtin`, a directory, or a mixture of them. Raises InputError."""
    if isinstance(data, str):
        return _directory(data, "recipe.data")
    return tuple(
        Weighted(source.path, _directory(source.path, f"recipe.data.{number}.path"), source.weight)
        for number, source in enumerate(data)
    )


def _directory(name: str, field: str) -> Path:
    if name == "builtin":
        return builtin_data()
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError):  # it may not be looked at; or `~name` of no user
        pass
    hint = "did you mean 'builtin'?" if nearest(name, ["builtin"]) else "give 'builtin' or a prepared directory"
    raise InputError(f"{field}: no directory '{name}'; {hint}")


def builtin_data(cache: Path | None = None) -> Path:
    """The prepared standard library, from the cache where it is there already.

    The directory's name holds the Python version and the format, since both change the tokens. Several processes may
    call this at once: each prepares by itself, one renames its result into place, and the others use that.
    Raises InputError naming SHARDWISE_CACHE where the cache cannot be written.
    """
    cache = _cache() if cache is None else cache
    directory = cache / f"builtin-python{platform.python_version()}-format{FORMAT}"
    try:
        if not (directory / INDEX).is_file():
            sources = Sources((sysconfig.get_paths()["stdlib"],), suffix=".py", skip=_LEFT_OUT)
            prepare_sources(
                sources,
                directory,
                ByteTokenizer(),
                Options(),
                validation_fraction=_VALIDATION_FRACTION,
                workers=1,
                resumable=False,
            )
    except (UnwritableError, OSError) as error:
        reason = error if isinstance(error, UnwritableError) else f"{directory}: cannot be read: {error.strerror}"
        raise InputError(f"{reason}; set SHARDWISE_CACHE to a directory that can be written") from None
    return directory


def _cache() -> Path:
    own, shared = os.environ.get("SHARDWISE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(shared) if shared else Path.home() / ".cache") / "shardwise"
    except RuntimeError:
        raise InputError("there is no home directory for the cache; set SHARDWISE_CACHE to a directory") from None
