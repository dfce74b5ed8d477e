"""Why a layout stands where it does, in a line or two."""

from __future__ import annotations

from shardwise.planner.flops import model_flops_per_token, recomputed_flops_per_token
from shardwise.planner.search import Found
from shardwise.planner.subject import Subject
from shardwise.spec.memory import GIB, PARTS

_WORTH_SAYING = 0.03  # share of the step from which a cost is named

_COSTS = {
    "recompute": "recomputing activations",
    "tensor": "exposed tensor-parallel communication",
    "context": "exposed context-parallel communication",
    "expert": "exposed expert all-to-all",
    "data": "exposed data-parallel communication",
    "offload": "copies to and from the host",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}


def utilisation(subject: Subject, tokens_per_second_per_gpu: float) -> tuple[float, float]:
    """MFU and HFU against the dense peak of the layers' dtype. HFU adds what is recomputed."""
    peak = subject.cluster.gpu.peak_flops(subject.dtype) or float("inf")
    flops = model_flops_per_token(subject.model, subject.sequence)
    repeated = recomputed_flops_per_token(subject.model, subject.sequence, subject.recompute)
    return flops * tokens_per_second_per_gpu / peak, (flops + repeated) * tokens_per_second_per_gpu / peak


def reasons(found: Found) -> tuple[str, ...]:
    """What the step is spent on beside compute, the largest first; and what fills the memory."""
    step, memory = found.step, found.memory
    costs = sorted(((step.parts[kind], text) for kind, text in _COSTS.items()), reverse=True)
    lines = [f"{text} {cost / step.seconds:.0%}" for cost, text in costs if cost >= _WORTH_SAYING * step.seconds]
    largest = max(PARTS, key=lambda part: getattr(memory, part))
    share = f"{largest} {getattr(memory, largest) / GIB:.1f} GiB of {memory.live / GIB:.1f} live"
    return (", ".join(lines) or "compute alone", share)
