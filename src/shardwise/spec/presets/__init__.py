"""Named models and chips, read from the YAML files beside this one."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import yaml

from shardwise.spec.cluster import Gpu, Link
from shardwise.spec.model import Model
from shardwise.spec.noun import InputError, unknown
from shardwise.spec.price import Price


@functools.cache
def _table(name: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.load(resources.files(__name__).joinpath(name).read_text(), Loader=yaml.CSafeLoader)
    return data


def _rows(name: str) -> list[dict[str, Any]]:
    text = resources.files(__name__).joinpath(name).read_text()
    rows: list[dict[str, Any]] = yaml.load(text, Loader=yaml.CSafeLoader)
    return rows


def model_names() -> list[str]:
    return list(_table("models.yaml"))


def gpu_names() -> list[str]:
    return list(_table("gpus.yaml"))


@functools.cache
def model_preset(name: str) -> Model:
    """The named model. Raises InputError that lists the presets and the nearest one."""
    if name not in _table("models.yaml"):
        raise InputError(unknown("model preset", name, model_names()))
    return Model.load({"name": name, **_table("models.yaml")[name]["model"]}, "model")


def published_parameters(name: str) -> int | None:
    """The parameter count that the model's authors published; None for our own tiny models."""
    count: int | None = _table("models.yaml")[name].get("parameters")
    return count


def published_active(name: str) -> float | None:
    """The parameters that one token goes through, as printed by the model's authors; None for dense models."""
    count = _table("models.yaml")[name].get("active")
    return None if count is None else float(count)


@functools.cache
def gpu_preset(name: str) -> Gpu:
    """The named chip. Raises InputError that lists the presets and the nearest one."""
    if name not in _table("gpus.yaml"):
        raise InputError(unknown("gpu preset", name, gpu_names()))
    return Gpu.load({"name": name, **_table("gpus.yaml")[name]}, "gpu")


@functools.cache
def link_preset(name: str) -> Link:
    """The named link. Raises InputError that lists the presets and the nearest one."""
    if name not in _table("links.yaml"):
        raise InputError(unknown("link preset", name, _table("links.yaml")))
    return Link.load({"name": name, **_table("links.yaml")[name]}, "link")


@functools.cache
def prices() -> tuple[Price, ...]:
    """The snapshot of dated offers."""
    return tuple(Price.load(row, "price") for row in _rows("prices.yaml"))


def gpu_called(device_name: str) -> Gpu | None:
    """The chip that the driver calls `device_name`, or None: an unknown chip has no peak, so no MFU."""
    for name in gpu_names():
        if device_name in gpu_preset(name).device_names:
            return gpu_preset(name)
    return None
