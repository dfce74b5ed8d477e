"""Gpu, Cluster: the machines, every figure with its class, source and date."""

from __future__ import annotations

import datetime
from typing import Any, Literal, Self

from pydantic import Field, model_serializer, model_validator

from shardwise.spec.noun import Noun
from shardwise.spec.numbers import Count, Positive

FigureClass = Literal["datasheet", "published", "measured"]


class Figure(Noun):
    """One number about hardware and where it comes from."""

    value: Positive
    class_: FigureClass = Field(alias="class")
    source: str
    date: datetime.date


class Gpu(Noun):
    """A chip. `peak_tflops` are dense rates per dtype; an absent dtype is unknown, never guessed."""

    name: str
    device_names: tuple[str, ...] = ()  # as the driver spells them
    peak_tflops: dict[str, Figure] = Field(default_factory=dict)
    memory_gb: Figure | None = None  # 1e9 bytes
    bandwidth_tb_s: Figure | None = None

    @model_validator(mode="before")
    @classmethod
    def _expand_figures(cls, data: Any) -> Any:
        """Bare numbers take the class, source and date that stand beside them."""
        if not isinstance(data, dict) or "source" not in data:
            return data
        data = dict(data)
        origin = {key: data.pop(key, None) for key in ("class", "source", "date")}

        def figure(value: Any) -> Any:
            return value if isinstance(value, dict) else {"value": value, **origin}

        data["peak_tflops"] = {dtype: figure(value) for dtype, value in data.get("peak_tflops", {}).items()}
        for key in ("memory_gb", "bandwidth_tb_s"):
            if key in data:
                data[key] = figure(data[key])
        return data

    def peak_flops(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s for 'bf16', 'fp8', …; None where it is not known."""
        figure = self.peak_tflops.get(dtype)
        return figure.value * 1e12 if figure else None


class Cluster(Noun):
    """How many of which chip, and how many share a node."""

    gpu: Gpu
    gpus: Count = 1
    gpus_per_node: Count = 8

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        from shardwise.spec.presets import gpu_preset

        if isinstance(data, dict) and isinstance(data.get("gpu"), str):
            return {**data, "gpu": gpu_preset(data["gpu"])}
        return data

    @model_validator(mode="after")
    def _whole_nodes(self) -> Self:
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            best = round(self.gpus / self.gpus_per_node) * self.gpus_per_node
            raise ValueError(f"gpus {self.gpus} does not fill nodes of {self.gpus_per_node}; nearest: {best}")
        return self

    @model_serializer(mode="wrap")
    def _short(self, handler: Any) -> dict[str, Any]:
        """A chip that equals its preset is written by name."""
        from shardwise.spec.presets import gpu_names, gpu_preset

        data: dict[str, Any] = handler(self)
        if self.gpu.name in gpu_names() and gpu_preset(self.gpu.name) == self.gpu:
            data["gpu"] = self.gpu.name
        return data
