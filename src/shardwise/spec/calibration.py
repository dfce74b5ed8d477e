"""Calibration: what `calibrate` measured on one machine. The planner reads it instead of its constants for that chip.

Each row is measured over a few sizes, which stand in one of its fields and ascend; the other fields hold one value for
each. Rates are TFLOP/s, times are microseconds. The planner interpolates (`planner/rates.py`).
"""

from __future__ import annotations

import datetime
from typing import Literal, Self

from pydantic import Field, model_validator

from shardwise.spec.noun import Noun
from shardwise.spec.numbers import Count, NotNegative, Positive

Op = Literal[
    "rmsnorm", "layernorm", "residual", "heads", "rotated_heads", "swiglu", "gelu", "routing",
    "bias", "loss", "chunked_loss", "embedding", "cast", "copy", "reduce_input", "accumulate", "clip", "adamw",
]  # fmt: skip


class ProductRate(Noun):
    """y = x Wᵀ with one W of (n, k), by the number of rows of x; the gradients with respect to x and W of the same.

    `groups` > 1: one kernel for as many experts, each with its own W and its own `rows`.
    """

    dtype: str
    n: Count
    k: Count
    groups: Count = 1
    rows: tuple[Count, ...]
    forward: tuple[Positive, ...]
    input_gradient: tuple[Positive, ...]
    weight_gradient: tuple[Positive, ...]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        require_series("rows", self.rows, forward=self.forward, input_gradient=self.input_gradient,
                       weight_gradient=self.weight_gradient)  # fmt: skip
        return self


class AttentionRate(Noun):
    """Causal attention of one kernel, by the length of the sequence; FLOPs counted causal, the backward's 2.5 times the
    forward's. `queries_per_key`: query heads that share a key and value head."""

    dtype: str
    backend: Literal["cudnn", "flash", "efficient", "math", "cpu"]
    head_dim: Count  # of queries and keys
    value_dim: Count
    queries_per_key: Count = 1
    lengths: tuple[Count, ...]
    forward: tuple[Positive, ...]
    backward: tuple[Positive, ...]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        require_series("lengths", self.lengths, forward=self.forward, backward=self.backward)
        return self


class MemoryBound(Noun):
    """An op of our trainer that is neither product nor attention, as the trainer runs it, by how many elements go in.

    Elements are: of the residual stream (norms, residual, embedding; routing: of all copies of the tokens), of the
    fused projection's output (heads: split into queries, keys and values; rotated_heads: and turned by RoPE), of the
    MLP's inner activation, of a product's output (bias: its gradient), of logits (losses), of weights (cast: to the
    compute type, and the gradient back; copy: within the compute type; reduce_input: gradients to fp32, cut for every
    rank, as FSDP2 reduces them; accumulate: one gradient into another; clip: norm and scaling; adamw).
    `compiled`: fused by torch.compile, a norm with the residual sum before it.
    """

    op: Op
    dtype: str
    compiled: bool = False
    elements: tuple[Count, ...]
    forward_us: tuple[Positive, ...]
    backward_us: tuple[Positive, ...] = ()  # none for what has no backward

    @model_validator(mode="after")
    def _complete(self) -> Self:
        require_series("elements", self.elements, forward_us=self.forward_us)
        if self.backward_us:
            require_series("elements", self.elements, backward_us=self.backward_us)
        return self

    @property
    def gb_per_second(self) -> float:
        """Elements' bytes over time at the largest size: to compare ops with each other, not with the chip's peak."""
        width = {"fp64": 8, "fp32": 4}.get(self.dtype, 2)
        return self.elements[-1] * width / self.forward_us[-1] / 1e3


Style = Literal["gpt", "llama", "qk_norm", "experts"]


class HostLayer(Noun):
    """What the host spends on one layer of negligible size, in our trainer: to launch its forward, its backward, and,
    once a step, its part of the gradient norm and the update. style: biases and LayerNorm, RMSNorm and a gated MLP,
    the same with normalized queries and keys, or with routed experts. sharded: by FSDP2 (zero 2 and 3)."""

    style: Style
    sharded: bool = False
    compiled: bool = False
    forward_us: NotNegative
    backward_us: NotNegative
    update_us: NotNegative


class HostExtra(Noun):
    """What a dimension or a recompute policy adds to a layer's forward and backward."""

    of: Literal["tensor", "context", "expert", "selective", "full"]
    forward_us: float
    backward_us: float


class HostTimes(Noun):
    """The host's time in a step. first, rest: of a micro-batch, before its first layer and outside of layers after
    that; step: once a step.

    serial: the host computes itself (a CPU), so its time adds to that of the kernels; on a GPU it runs ahead of them.
    """

    launch_us: NotNegative = 0.0
    serial: bool = False
    layers: tuple[HostLayer, ...] = ()
    extras: tuple[HostExtra, ...] = ()
    first_us: NotNegative = 0.0
    rest_us: NotNegative = 0.0
    step_us: NotNegative = 0.0


class Copies(Noun):
    """GB/s of large copies: within the device, bytes read and written; from and to pinned host memory."""

    device_gb_s: Positive
    to_device_gb_s: Positive | None = None
    to_host_gb_s: Positive | None = None


class Overheads(Noun):
    """GiB that no tensor of ours holds. context: used by the driver before the first tensor; workspaces: kept by
    libraries after products and attention have run."""

    context_gib: NotNegative = 0.0
    workspaces_gib: NotNegative = 0.0


class Overlap(Noun):
    """Products beside an all-gather and a reduce-scatter. slowdown: how much longer the products take, as a share of
    the time that is shared; hides: the share of the exchanges that costs no time."""

    slowdown: NotNegative
    hides: NotNegative = Field(le=1)


class Calibration(Noun):
    """Everything that one `calibrate` measured."""

    command: str
    date: datetime.date
    device: str
    torch: str
    driver: str | None = None
    ranks: Count = 1
    quick: bool = False
    products: tuple[ProductRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    memory_bound: tuple[MemoryBound, ...] = ()
    host: HostTimes = HostTimes()
    copies: Copies | None = None
    overheads: Overheads = Overheads()
    overlap: Overlap | None = None

    @property
    def source(self) -> str:
        """Where the figures come from, in a line."""
        return f"`{self.command}` on {self.device}, torch {self.torch}" + (f", {self.ranks} ranks" * (self.ranks > 1))


def require_series(name: str, sizes: tuple[int, ...], **values: tuple[float, ...]) -> None:
    """Raises ValueError unless sizes ascend and every series has a value for each."""
    if not sizes or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"{name} must ascend, and hold at least one")
    for field, series in values.items():
        if len(series) != len(sizes):
            raise ValueError(f"{field} has {len(series)} values for {len(sizes)} {name}")
