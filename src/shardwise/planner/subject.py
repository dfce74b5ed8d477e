"""Subject: what is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.recompute import NONE, Recompute
from shardwise.planner.stacks import Stack
from shardwise.spec import Cluster, Layout, Model


@dataclass(frozen=True)
class Subject:
    """What is predicted: a model on a layout of a cluster, the shape of its batch, and the software that trains it."""

    model: Model
    layout: Layout
    cluster: Cluster
    stack: Stack
    sequence: int
    micro_batches: int  # per step and data rank
    dtype: str = "bf16"  # of the layers' products: bf16, fp8, fp4
    recompute: Recompute = NONE
    sequence_parallel: bool = True
    gradient_bytes: int = 4  # per element, in the reduction
    gather_bytes: float = 2.0  # per element, in the gather of parameters


def assumed_micro_batches(layout: Layout) -> int:
    """Per step and data rank, where no batch is given: one, or under a pipeline four rounds of it."""
    return 1 if layout.pp == 1 else 4 * layout.pp
