"""Subject: what is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.recompute import NONE, Recompute, recompute_of
from shardwise.planner.stacks import Stack
from shardwise.spec import Cluster, Layout, Model, Precision, Recipe

_BYTES = {"fp64": 8, "fp32": 4}  # 2 in every other type


@dataclass(frozen=True)
class Subject:
    """What is predicted: a model on a layout of a cluster, the shape of its batch, and the software that trains it."""

    model: Model
    layout: Layout
    cluster: Cluster
    stack: Stack
    sequence: int
    micro_batches: int  # per step and data rank
    dtype: str = "bf16"  # of the layers' products: bf16, fp8, fp4, fp32, fp64
    recompute: Recompute = NONE
    sequence_parallel: bool = True
    gradient_bytes: int = 4  # per element, in the reduction
    gather_bytes: float = 2.0  # per element, in the gather of parameters

    @property
    def activation_bytes(self) -> int:
        """Of one element that flows through the layers."""
        return _BYTES.get(self.dtype, 2)


def subject_of(
    model: Model, layout: Layout, cluster: Cluster, stack: Stack, recipe: Recipe, micro_batches: int
) -> Subject:
    """The Subject that a Recipe makes of them."""
    precision = recipe.precision
    return Subject(
        model,
        layout,
        cluster,
        stack,
        recipe.sequence,
        micro_batches,
        dtype=dtype_of(precision),
        recompute=recompute_of(layout.recompute),
        gradient_bytes=_BYTES.get(precision.reduce, 2),
        gather_bytes=_BYTES.get(precision.compute, 2),  # fp8 products, too, gather bf16 weights and cast them
    )


def dtype_of(precision: Precision) -> str:
    """The dtype whose rate the layers' products run at: fp16's is that of bf16."""
    if precision.products != "compute":
        return precision.products
    return "bf16" if precision.compute == "fp16" else precision.compute


def assumed_micro_batches(layout: Layout) -> int:
    """Per step and data rank, where no batch is given: one, or under a pipeline four rounds of it."""
    return 1 if layout.pp == 1 else 4 * layout.pp
