"""Precision, Recipe: all that may change what is learned."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, TypeAdapter, model_validator

from shardwise.spec.noun import Noun, unknown
from shardwise.spec.numbers import Count, CountOrZero, Fraction, NotNegative, Positive

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]

# Parameters are the fp32 master copy; each layer casts them to the compute type where it uses them.
_BF16 = {"parameters": "fp32", "compute": "bf16", "gradients": "fp32", "reduce": "fp32", "moments": "fp32"}
_PRECISIONS = {
    "bf16": _BF16,
    "fp8": {**_BF16, "products": "fp8"},
    "fp4": {**_BF16, "products": "fp4"},
    "nvfp4": {**_BF16, "products": "fp4"},
    "fp16": {"parameters": "fp32", "compute": "fp16", "gradients": "fp32", "reduce": "fp32", "moments": "fp32"},
    "fp32": dict.fromkeys(("parameters", "compute", "gradients", "reduce", "moments"), "fp32"),
    "fp64": dict.fromkeys(("parameters", "compute", "gradients", "reduce", "moments"), "fp64"),
}


class Precision(Noun):
    """The dtype of everything that has one. `bf16`, `fp16`, `fp32`, `fp64`, `fp8` and `fp4` (or `nvfp4`) name the usual
    combinations."""

    parameters: Dtype = "fp32"  # what the optimizer updates
    compute: Dtype = "bf16"
    products: Literal["compute", "fp8", "fp4"] = "compute"  # operands of the blocks' matrix products; the rest computes
    gradients: Dtype = "fp32"  # what the optimizer reads
    reduce: Dtype = "fp32"  # what collectives sum
    moments: Dtype = "fp32"

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        if isinstance(data, str):
            if data not in _PRECISIONS:
                raise ValueError(unknown("precision", data, _PRECISIONS))
            return _PRECISIONS[data]
        return data

    @model_validator(mode="after")
    def _narrower(self) -> Self:
        if self.products != "compute" and self.compute not in ("bf16", "fp16"):
            raise ValueError(f"products {self.products} needs compute bf16 or fp16, not {self.compute}; nearest: bf16")
        return self

    @property
    def name(self) -> str:
        """Of the usual combination; of any other what its products are in, as in `custom bf16`."""
        for name, fields in _PRECISIONS.items():
            if self == Precision.model_validate(fields):
                return name
        return f"custom {self.compute if self.products == 'compute' else self.products}"


class Optimizer(Noun):
    """AdamW or SGD. Weight decay acts on parameters of two or more dimensions only."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 6e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    momentum: Fraction = 0.0  # sgd only
    clip: NotNegative = 1.0  # largest global gradient norm; 0: no clipping


class Schedule(Noun):
    """Learning rate over the run: warm-up, then cosine, or stable then decay (wsd), or constant."""

    name: Literal["cosine", "wsd", "constant"] = "wsd"
    warmup_steps: CountOrZero = 0
    decay_fraction: Fraction = 0.4  # wsd: the share of all steps that decays linearly
    floor: Fraction = 0.1  # last learning rate as a share of the highest


class Balance(Noun):
    """How routed experts are kept equally busy; both 0: not at all."""

    auxiliary: NotNegative = 0.0  # factor of the sequence-wise balance loss (DeepSeek-V3, arXiv 2412.19437, eq. 17-20)
    bias_rate: NotNegative = 0.0  # what a step adds to, or takes from, an expert's bias (arXiv 2408.15664)


class Evaluation(Noun):
    """Validation loss over a fixed number of held-out tokens."""

    every: CountOrZero = 0  # steps; 0: only at the end
    tokens: CountOrZero = 1_000_000  # rounded down to whole sequences, all of the split where it is smaller; 0: never


class CheckpointPolicy(Noun):
    """When to save and how many complete checkpoints to keep."""

    every: CountOrZero = 0  # steps; 0: only at the end and when stopped
    keep: Count = 2
    asynchronous: bool = True


class Source(Noun):
    """One part of a mixture: what `data` may be by itself, and how much of it there is beside the others."""

    path: str
    weight: Positive = 1.0  # a share of all sequences, once it is divided by the sum of all weights


def _check_sources(value: Any) -> Any:
    """A list of sources by itself, so that its errors name their place in it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("`builtin`, a directory, or a list of {path: DIRECTORY, weight: NUMBER} is expected")
    listed = tuple({"path": item} if isinstance(item, str) else item for item in value)
    sources = TypeAdapter(tuple[Source, ...]).validate_python(listed)
    for number, source in enumerate(sources):
        if source.path in (earlier.path for earlier in sources[:number]):
            raise ValueError(f"'{source.path}' stands twice")
    return sources


class Recipe(Noun):
    """What is trained on what, for how long, and how."""

    # `builtin`, a directory (docs/data.md), or several with their weights
    data: Annotated[str | tuple[Source, ...], BeforeValidator(_check_sources)] = "builtin"
    sequence: Count = 1024
    batch_tokens: Count | None = None  # tokens of one optimizer step over all ranks; `train` requires it
    steps: Count | None = None
    tokens: Count | None = None  # instead of steps: rounded up to whole steps
    seed: CountOrZero = 0
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    balance: Balance = Balance()
    evaluation: Evaluation = Evaluation()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    deterministic: bool = False  # ask torch for deterministic kernels (always so on a CPU)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.steps and self.tokens:
            raise ValueError("give steps or tokens, not both")
        if self.batch_tokens and self.batch_tokens % self.sequence:
            nearest = max(1, round(self.batch_tokens / self.sequence)) * self.sequence
            raise ValueError(
                f"batch_tokens {self.batch_tokens} is not a multiple of sequence {self.sequence}; nearest: {nearest}"
            )
        return self

    @property
    def batch_sequences(self) -> int:
        """Sequences of one optimizer step over all ranks. Raises ValueError where batch_tokens is absent."""
        if not self.batch_tokens:
            raise ValueError("recipe.batch_tokens is required")
        return self.batch_tokens // self.sequence

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run. Raises ValueError where neither steps nor tokens are given."""
        if self.steps:
            return self.steps
        if self.tokens and self.batch_tokens:
            return math.ceil(self.tokens / self.batch_tokens)
        raise ValueError("recipe.steps or recipe.tokens is required")
