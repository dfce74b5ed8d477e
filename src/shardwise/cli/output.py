"""Files that a command was asked to write: whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shardwise.spec import InputError


def write_whole(path: Path, text: str, option: str) -> None:
    """Write through a temporary file beside it. Raises InputError naming the option where that cannot be done."""
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if temporary:
            temporary.unlink(missing_ok=True)
        raise InputError(f"{option} {path}: cannot be written: {error.strerror or error}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
