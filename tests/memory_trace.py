"""What our own trainer allocates on one rank of any world (src/shardwise/rehearsal), beside the planner's closed form.

python tests/memory_trace.py        cases of one machine after the other, a minute or two
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from shardwise.planner.memory import predict_memory
from shardwise.planner.memory.activations import IMBALANCE
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


def trace_in_child(run: Run, rank: int = 0) -> Peak:
    """In a process of its own."""
    (found,) = in_children(_peak, [(run, rank)])
    return found


def _peak(run: Run, rank: int) -> Peak:
    ledger = trace(run, rank, imbalance=IMBALANCE).ledger
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
    # DDP, and its sums by hand beside other dimensions
    (("gpt2-124m", 1024, 1, None), {"dp_replicate": 8, "micro_batch": 4}),
    (("gpt2-124m", 256, 2, None), {"dp_replicate": 8, "recompute": "full", "loss": "chunked"}),
    (("llama3.2-1b", 2048, 3, 8), {"dp_replicate": 4, "recompute": "selective"}),
    (("llama3.2-1b", 2048, 2, 8), {"dp_replicate": 4, "tp": 2}),
    (("llama3-8b", 4096, 2, 4), {"dp_shard": 4, "tp": 2, "zero": 1}),
    # TP and CP
    (("llama3-8b", 8192, 2, 4), {"dp_shard": 8, "tp": 8}),
    (("llama3-8b", 8192, 1, 4), {"dp_shard": 8, "tp": 4, "zero": 2, "recompute": "selective"}),
    (("llama3-8b", 32768, 1, 4), {"dp_shard": 2, "cp": 8}),
    (("llama3-8b", 32768, 1, 4), {"dp_shard": 2, "cp": 8, "cp_method": "ring", "recompute": "full"}),
    (("llama3-8b", 16384, 2, 4), {"dp_shard": 2, "cp": 4, "cp_method": "ulysses", "loss": "chunked"}),
    (("llama3-8b", 16384, 1, 4), {"cp": 2, "cp_method": "ring", "tp": 4, "zero": 0}),
    # PP
    (("llama3-8b", 4096, 8, 8), {"pp": 4, "dp_shard": 8}),
    (("llama3-8b", 4096, 4, 8), {"pp": 2, "dp_shard": 8, "schedule": "gpipe", "recompute": "full"}),
    (("llama3-8b", 4096, 4, 8), {"pp": 2, "dp_shard": 8, "zero": 2, "schedule": "interleaved", "virtual_stages": 2}),
    (("llama3-8b", 4096, 4, 8), {"pp": 2, "tp": 4, "schedule": "interleaved-zb", "virtual_stages": 2}),
    (("llama3-8b", 4096, 4, 8), {"pp": 2, "tp": 2, "dp_shard": 4, "zero": 2, "schedule": "zbv", "virtual_stages": 2}),
    (("llama3-8b", 4096, 6, 8), {"pp": 2, "tp": 2, "schedule": "dualpipev", "virtual_stages": 2}),
    (("llama3-8b", 4096, 8, 8), {"pp": 4, "tp": 2, "dp_replicate": 2, "loss": "chunked", "recompute": "selective"}),
    # Experts
    (("qwen3-30b-a3b", 4096, 1, 3), {"dp_shard": 8}),
    (("qwen3-30b-a3b", 4096, 2, 3), {"dp_shard": 8, "ep": 4}),
    (("qwen3-30b-a3b", 4096, 1, 3), {"dp_shard": 8, "tp": 4, "ep": 8, "zero": 2}),
    (("qwen3-30b-a3b", 4096, 4, 4), {"dp_shard": 8, "pp": 2, "ep": 8, "recompute": "full"}),
    (("qwen3-30b-a3b", 4096, 1, 2), {"tp": 4, "zero": 0, "recompute": "selective"}),
    (("mixtral-8x7b", 4096, 1, 3), {"dp_shard": 8, "tp": 4, "recompute": "selective"}),
    (("mixtral-8x7b", 4096, 1, 3), {"dp_shard": 2, "cp": 4, "ep": 8, "loss": "chunked"}),
    (("mixtral-8x7b", 8192, 2, 3), {"dp_shard": 8, "tp": 8, "ep": 8, "zero": 2}),
    (("deepseek-v3", 4096, 1, 5), {"dp_shard": 64, "ep": 64, "recompute": "full"}),
    (("deepseek-v3", 4096, 1, 5), {"dp_shard": 32, "tp": 8, "ep": 32}),
    # Offload
    (("llama3.2-1b", 4096, 1, 8), {"dp_shard": 8, "micro_batch": 2, "offload": "activations", "loss": "chunked"}),
    (("llama3-8b", 8192, 2, 4), {"dp_shard": 8, "offload": "activations", "recompute": "full"}),
    (("llama3-8b", 4096, 1, 4), {"dp_shard": 8, "offload": "optimizer", "recompute": "full", "loss": "chunked"}),
    (("llama3-8b", 4096, 2, 4), {"dp_shard": 8, "offload": "parameters", "recompute": "full", "loss": "chunked"}),
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
        memory = predict_memory(subject_of(run, micro_batches))
        traced = trace_in_child(run, memory.rank)
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
