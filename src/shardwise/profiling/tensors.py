"""Which tensor of a training step has a given size."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner.parameters import layer_parameters
from shardwise.planner.subject import Subject

_ALIKE = 0.02  # the allocator rounds up to 2 MiB above 1 MiB, and messages to two decimals


def likely_tensors(subject: Subject, size: float) -> list[str]:
    """Those of about `size` bytes, the nearest first."""
    rows = sorted((abs(bytes_ / size - 1), what) for what, bytes_ in _tensors(subject) if bytes_ > 0)
    return [what for difference, what in rows if difference < _ALIKE]


def _tensors(subject: Subject) -> Iterator[tuple[str, float]]:
    model, layout = subject.model, subject.layout
    tokens = layout.micro_batch * subject.sequence / layout.cp
    tp = layout.tp
    split = tp if subject.sequence_parallel else 1
    sizes = {
        f"the logits of a micro-batch ({tokens:,.0f} tokens × {model.vocabulary // tp:,})": tokens
        * model.vocabulary
        / tp,
        "the hidden states of a micro-batch": tokens * model.hidden / split,
        "the inner activations of an MLP": tokens * model.ffn / tp,
        "both halves of a gated MLP's inner activations": 2 * tokens * model.ffn / tp,
        "attention scores, which a flash kernel never keeps": layout.micro_batch
        * model.heads
        / tp
        * subject.sequence**2
        / layout.cp,
        "a layer's gathered parameters": float(layer_parameters(model, layout, model.layers - 1)),
        "the embedding or the output head": model.vocabulary * model.hidden / tp,
    }
    for what, elements in sizes.items():
        for dtype, width in (("bf16", 2), ("fp32", 4)):
            yield f"{what} in {dtype}", width * elements
