"""Gpu, Link, Cluster: the machines, every figure with its class, source and date."""

from __future__ import annotations

import datetime
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_serializer, model_validator

from shardwise.spec.calibration import Calibration
from shardwise.spec.noun import Noun
from shardwise.spec.numbers import Count, Positive

FigureClass = Literal["datasheet", "published", "measured"]
Curve = tuple[tuple[Positive, Positive], ...]
Exchange = Literal["gather", "all_reduce", "reduce_scatter", "all_to_all", "hop"]


class Figure(Noun):
    """One number about hardware and where it comes from."""

    value: Positive
    class_: FigureClass = Field(alias="class")
    source: str
    date: datetime.date


class Link(Noun):
    """How fast a group of chips exchanges data: a latency per hop, and bandwidth by message size.

    `curve` holds (message in bytes, GB/s) points of bus bandwidth in NCCL's sense (algorithm bandwidth times 2(n-1)/n
    for all-reduce, (n-1)/n for all-gather and reduce-scatter), one direction, per chip. The other curves are those of
    other exchanges where they differ; without one, `curve` counts.
    """

    name: str
    latency_us: Positive
    curve: Curve
    reduce_curve: Curve = ()  # all-reduce, which switches may help
    scatter_curve: Curve = ()  # reduce-scatter
    exchange_curve: Curve = ()  # all-to-all, by the bytes that a rank sends to others
    hop_curve: Curve = ()  # one rank to one other
    class_: FigureClass = Field(alias="class")
    source: str
    date: datetime.date

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for curve in (self.curve, self.reduce_curve, self.scatter_curve, self.exchange_curve, self.hop_curve):
            sizes = [size for size, _ in curve]
            if sizes != sorted(set(sizes)):
                raise ValueError("the message sizes of a curve must ascend")
        if not self.curve:
            raise ValueError("a curve needs at least one (bytes, GB/s) point")
        return self

    def bytes_per_second(self, message: float, kind: Exchange = "gather") -> float:
        """Bus bandwidth at a message size: log-log interpolation, in proportion to the size below the first point."""
        curves = {
            "all_reduce": self.reduce_curve,
            "reduce_scatter": self.scatter_curve,
            "all_to_all": self.exchange_curve,
            "hop": self.hop_curve,
        }
        curve = curves.get(kind) or self.curve
        first, last = curve[0], curve[-1]
        if message <= first[0]:
            return first[1] * 1e9 * max(message, 1.0) / first[0]
        if message >= last[0]:
            return last[1] * 1e9
        for (low, slow), (high, fast) in pairwise(curve):
            if message <= high:
                share = math.log(message / low) / math.log(high / low)
                return float(slow * (fast / slow) ** share * 1e9)
        raise AssertionError("unreachable: the curve covers every size")


class Gpu(Noun):
    """A chip. `peak_tflops` are dense rates per dtype; an absent dtype is unknown, never guessed."""

    name: str
    device_names: tuple[str, ...] = ()  # as the driver spells them
    peak_tflops: dict[str, Figure] = Field(default_factory=dict)
    memory_gb: Figure | None = None  # 1e9 bytes
    bandwidth_tb_s: Figure | None = None
    multiprocessors: Count | None = None
    node: Count = 8  # chips of one host
    domain: Count = 8  # chips that share the fast link; more than a host in rack-scale systems
    intra: Link | None = None  # within the domain
    inter: Link | None = None  # per chip, between domains
    calibration: Calibration | None = None  # what `calibrate` measured on one such chip

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

    @field_validator("intra", "inter", mode="before")
    @classmethod
    def _link_from_preset(cls, value: Any) -> Any:
        from shardwise.spec.presets import link_preset

        return link_preset(value) if isinstance(value, str) else value

    def peak_flops(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s for 'bf16', 'fp8', …; None where it is not known."""
        figure = self.peak_tflops.get(dtype)
        return figure.value * 1e12 if figure else None


class Cluster(Noun):
    """How many of which chip, and how many share a node."""

    gpu: Gpu
    gpus: Count = 1
    gpus_per_node: Count  # default: the chip's

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        from shardwise.spec.presets import gpu_preset

        if isinstance(data, str):
            data = _read_cluster(data)
        elif isinstance(data, dict) and "file" in data:  # with changes: `--cluster.gpus 16` on a file
            data = {**_read_cluster(str(data["file"])), **{key: value for key, value in data.items() if key != "file"}}
        if isinstance(data, dict) and isinstance(data.get("gpu"), str):
            data = {**data, "gpu": gpu_preset(data["gpu"])}
        if isinstance(data, dict) and isinstance(data.get("gpu"), Gpu):
            return {"gpus_per_node": data["gpu"].node, **data}
        if isinstance(data, dict) and isinstance(data.get("gpu"), dict):  # one that `calibrate` or a person wrote out
            return {"gpus_per_node": data["gpu"].get("node", 8), **data}
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


def _read_cluster(name: str) -> dict[str, Any]:
    """The fields of a Cluster file. Raises ValueError."""
    from shardwise.spec.presets import gpu_names
    from shardwise.spec.run import read_yaml

    if name in gpu_names():
        raise ValueError(f"a mapping is expected, such as {{gpu: {name}, gpus: 8}}, or a file that `calibrate` wrote")
    data = read_yaml(Path(name).expanduser())
    if not isinstance(data, dict) or "gpu" not in data:
        raise ValueError(f"{name} is no Cluster file: it has no field gpu")
    return data
