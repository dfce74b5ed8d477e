"""An Explanation as text: memory bars, what binds, the timeline, and what the neighbours would change."""

from __future__ import annotations

from shardwise.planner.explanation import Explanation
from shardwise.planner.stacks import generation
from shardwise.report.plan_table import layout_words
from shardwise.spec.memory import GIB, OUTSIDE, PARTS, Memory
from shardwise.timeline import draw

_BAR = 40
_WORTH = 0.0005  # share of the step from which a part of it is named


def explanation_text(explanation: Explanation) -> str:
    """The whole answer, to print."""
    run, candidate = explanation.run, explanation.candidate
    time, cost = candidate.time, candidate.cost
    head = (
        f"{run.model.name} on {run.cluster.gpus} × {run.cluster.gpu.name}, sequence {run.recipe.sequence}: "
        f"{layout_words(candidate.layout)}, {explanation.micro_batches} micro-batches a step"
    )
    step = (
        f"step {time.step_seconds:.3f} s, {time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {time.mfu:.1%}, "
        f"HFU {time.hfu:.1%}" + (f", bubble {time.bubble_fraction:.1%}" if candidate.layout.pp > 1 else "")
    )
    if cost.usd is not None and cost.hours is not None:
        step += f"; the whole run {cost.hours / 24:,.1f} days, {cost.usd:,.0f} USD"
    blocks = [
        [head, step, f"verdict: {candidate.verdict}", f"binds: {explanation.binding.what}: {explanation.binding.why}"],
        _memory(explanation),
        [f"One step of rank {explanation.rank}", draw(explanation.timeline, 80), _parts(explanation)],
        _neighbours(explanation),
        list(explanation.notes),
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _memory(explanation: Explanation) -> list[str]:
    memory, capacity = explanation.memory, explanation.capacity
    low, _, high = memory.used
    scale = max(capacity or 0.0, high)
    lines = [f"Memory of rank {explanation.rank} at its peak ({memory.event or 'peak'}), GiB"]
    lines += [_bar(part, getattr(memory, part), scale) for part in PARTS]
    lines.append(_bar("live", memory.live, scale))
    lines.append(_bar("allocator slack", _slack(memory), scale))
    process = "process" if generation(explanation.run.cluster.gpu) == "cpu" else "CUDA context"
    lines += [_bar({"outside": process}.get(part, part), getattr(memory, part), scale) for part in OUTSIDE]
    used = f"used {low / GIB:.1f} to {high / GIB:.1f}"
    if capacity is None:
        return [*lines, f"{used}; how much {explanation.run.cluster.gpu.name} has is unknown"]
    headroom = f"headroom {(capacity - high) / GIB:.1f} to {(capacity - low) / GIB:.1f}"
    return [*lines, f"{used} of {capacity / GIB:.1f}: {headroom}"]


def _slack(memory: Memory) -> float:
    return memory.reserved[1] - memory.live


def _bar(name: str, size: float, scale: float) -> str:
    cells = size / scale * _BAR
    full = int(cells)
    bar = "█" * full + ("▌" if cells - full >= 0.5 else "")
    return f"  {name:<16}{size / GIB:8.2f} {bar}".rstrip()


def _parts(explanation: Explanation) -> str:
    total = explanation.candidate.time.step_seconds
    parts = sorted(explanation.parts_seconds.items(), key=lambda item: -item[1])
    named = [f"{kind} {seconds / total:.1%}" for kind, seconds in parts if seconds > _WORTH * total]
    return "of the busiest rank's step: " + ", ".join(named)


def _neighbours(explanation: Explanation) -> list[str]:
    able = [item for item in explanation.neighbours if item.reason is None]
    barred = [item for item in explanation.neighbours if item.reason is not None]
    lines = ["What each neighbouring choice would change", *(f"  {item.line()}" for item in able)]
    lines += [f"  {item.line()}" for item in barred]
    return lines
