"""What our own trainer allocates on one rank of any world (src/shardwise/rehearsal), beside the planner's closed form.

python tests/memory_trace.py        cases of one machine after the other, a minute or two
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from shardwise.planner.memory import predict_memory
from shardwise.planner.memory.families import WORKSPACE
from shardwise.planner.stacks import STACKS
from shardwise.planner.subject import Subject
from shardwise.rehearsal.child import in_children
from shardwise.rehearsal.trace import trace
from shardwise.spec import Layout, Run
from shardwise.spec.memory import GIB


@dataclass
class Peak:
    """Bytes at the peak of a step, where that was, and bytes between steps."""

    peak: int
    at: str
    held: int


def trace_in_child(run: Run) -> Peak:
    """Rank 0, in a process of its own."""
    (found,) = in_children(_peak, [(run,)])
    return found


def _peak(run: Run) -> Peak:
    ledger = trace(run, 0).ledger
    event = ledger.peak()
    block = ledger.blocks[ledger.events[event][0]]
    return Peak(ledger.sizes[event], f"{block.operator} in {block.module}", ledger.sizes[ledger.start - 1])


def example(
    model: str | dict[str, Any], sequence: int, micro_batches: int = 1, layers: int | None = None, **layout: Any
) -> Run:
    """A Run of a preset, cut to `layers`, on the layout."""
    data = {"preset": model} if isinstance(model, str) else dict(model)
    spread = Layout.load(layout)
    batch = sequence * micro_batches * spread.micro_batch * spread.data_ranks
    return Run.load(
        {
            "model": data | ({"layers": layers} if layers else {}),
            "cluster": {"gpu": "h100-sxm", "gpus": spread.world, "gpus_per_node": spread.world},
            "layout": spread,
            "recipe": {"sequence": sequence, "batch_tokens": batch, "steps": 2},
        }
    )


def subject_of(run: Run, micro_batches: int = 1) -> Subject:
    """The same for the planner."""
    return Subject(
        model=run.model,
        layout=run.fixed_layout,
        cluster=run.cluster,
        stack=STACKS["shardwise"],
        sequence=run.recipe.sequence,
        micro_batches=micro_batches,
    )


CASES = [  # (model, sequence, micro-batches a step, layers), layout
    (("gpt2-124m", 1024, 1, None), {"dp_shard": 8, "micro_batch": 8}),
    (("gpt2-124m", 1024, 4, None), {"dp_shard": 8, "micro_batch": 8}),
    (("gpt2-124m", 64, 1, None), {"dp_shard": 8}),
    (("gpt2-124m", 256, 2, None), {"dp_shard": 2, "micro_batch": 2, "zero": 2}),
    (("gpt2-124m", 1024, 2, None), {"micro_batch": 4}),
    (("gpt2-124m", 64, 1, None), {}),
    (("gpt2-124m", 64, 2, None), {}),
    (("llama3.2-1b", 4096, 1, None), {"dp_shard": 8, "micro_batch": 2}),
    (("llama3.2-1b", 512, 2, None), {"dp_shard": 8}),
    (("llama3.2-1b", 2048, 2, None), {"dp_shard": 64, "zero": 2}),
    (("llama3-8b", 4096, 1, 4), {"dp_shard": 64}),
    (("llama3-8b", 8192, 4, 4), {"dp_shard": 64}),
    (("llama3-8b", 512, 1, 4), {"dp_shard": 64}),
    (("llama3-8b", 512, 2, 4), {"dp_shard": 8, "zero": 2}),
    (("llama3-8b", 4096, 1, 4), {"dp_shard": 64, "zero": 2}),
    (("llama3-8b", 4096, 3, 4), {"dp_shard": 64, "zero": 2}),
    (("llama3-8b", 8192, 2, 4), {"dp_replicate": 8, "dp_shard": 8}),
    (("llama3-8b", 256, 2, 4), {"dp_replicate": 8, "dp_shard": 8}),
    (("qwen3-8b", 4096, 1, 3), {"dp_shard": 16}),
    (("qwen3-8b", 256, 2, 3), {"dp_shard": 16}),
    *[
        (case, {**layout, "recompute": policy, "loss": "chunked"})
        for case, layout in [
            (("llama3.2-1b", 4096, 1, 4), {"dp_shard": 8, "micro_batch": 4}),
            (("gpt2-124m", 1024, 1, 9), {"dp_shard": 8, "micro_batch": 8}),
            (("llama3-8b", 8192, 1, 4), {"dp_shard": 8, "tp": 8}),
            (("llama3-8b", 8192, 2, 4), {}),
        ]
        for policy in ("none", "selective", "full", "every:2", "sqrt")
    ],
]


def main() -> None:
    """Prints each case: traced, predicted, and the error."""
    errors = []
    for (model, sequence, micro_batches, layers), layout in CASES:
        run = example(model, sequence, micro_batches, layers, **layout)
        traced = trace_in_child(run)
        memory = predict_memory(subject_of(run, micro_batches))
        live = memory.live - WORKSPACE
        states = memory.parameters + memory.optimizer
        errors.append(abs(live / traced.peak - 1))
        print(
            f"{live / traced.peak - 1:+7.2%}  traced {traced.peak / GIB:8.4f} ({traced.at})  "
            f"predicted {live / GIB:8.4f} ({memory.event})  states {traced.held / GIB:.4f} {states / GIB:.4f}  "
            f"{model} S {sequence} m {micro_batches} L {layers or 'all'} {layout}",
            flush=True,
        )
    print(f"median {statistics.median(errors):.2%}, max {max(errors):.2%}")


if __name__ == "__main__":
    main()
