"""Dashboards that metrics can be sent to, beside metrics.jsonl. Each is imported where it is built, in its thread."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shardwise.spec import InputError, read_yaml
from shardwise.spec.noun import unknown


class Logger(Protocol):
    """A destination for numbers; built from a run directory whose run.yaml and first event are written."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN_DIR/tensorboard."""

    def __init__(self, out: Path):
        from tensorboard.summary import Writer

        self._writer = Writer(str(out / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE (offline: files in RUN_DIR/wandb) and the like
    say where it goes."""

    def __init__(self, out: Path):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shardwise"),
            id=os.environ.get("WANDB_RUN_ID", dashboard_name(out)),
            name=os.environ.get("WANDB_NAME", out.resolve().name),
            dir=os.environ.get("WANDB_DIR", str(out)),
            resume="allow",
            config=read_yaml(out / "run.yaml"),
            settings=wandb.Settings(console="off"),  # it would take over stdout, which the progress line writes to
        )
        # A run that was killed makes some steps again. As its own axis, `step` may go back; wandb's may not.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A trackio run, kept on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name another place."""

    def __init__(self, out: Path):
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "shardwise"),
            name=dashboard_name(out),
            resume="allow",
            config=read_yaml(out / "run.yaml"),
            embed=False,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, Callable[[Path], Logger]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def require_loggers(names: tuple[str, ...]) -> None:
    """Raise InputError for a name that is unknown, or whose package is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise InputError(f"--log: {unknown('logger', name, LOGGERS)}")
        found = importlib.util.find_spec(name)  # packages are called as their loggers are
        if found is None or found.origin is None:  # without an origin it is a directory of that name, such as ./wandb
            raise InputError(f"--log {name} needs a package that is not installed: pip install 'shardwise[{name}]'")


def dashboard_name(out: Path) -> str:
    """What a dashboard knows the run in `out` by: the same after a resume, another for a run that starts afresh there.

    The directory's name, and a hash of the first line of its events.jsonl, which says when the run started.
    """
    with (out / "events.jsonl").open("rb") as file:
        first: Any = file.readline()
    return f"{out.resolve().name}-{hashlib.sha256(first).hexdigest()[:8]}"
