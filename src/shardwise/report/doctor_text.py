"""A Consultation as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.report.profile_text import remedy_line, time
from shardwise.spec.memory import GIB, OUTSIDE, PARTS, Memory

if TYPE_CHECKING:
    from shardwise.profiling.missing import Loss, Mishap
    from shardwise.profiling.snapshot import Snapshot

_MISHAPS = 4


def doctor_lines(answer: Any) -> list[str]:
    """`answer`: of verbs/doctor.py."""
    lines: list[str] = []
    if answer.run is not None:
        run = answer.run
        lines.append(f"{run.model.name} on {run.cluster.gpus} × {run.cluster.gpu.name}: {run.fixed_layout.describe()}")
    if answer.speed is not None:
        lines += _speed(answer.speed)
    lines += [f"- {line}" for line in answer.findings]
    if answer.speed is not None:
        lines += _losses(answer.speed.losses, answer.speed.step_seconds)
        lines += _mishaps(answer.speed.mishaps)
    elif answer.memory is not None:
        lines += _memory(answer.memory)
    if answer.snapshot is not None:
        lines += _snapshot(answer.snapshot)
    if answer.remedies:
        lines += ["", "try, in this order:"]
        lines += [f"  {number}. {_remedy(item)}" for number, item in enumerate(answer.remedies, start=1)]
    return [*lines, *(["", *answer.notes] if answer.notes else [])]


def _speed(speed: Any) -> list[str]:
    rows = [
        ("measured", speed.measured, speed.mfu),
        ("predicted for this layout", speed.predicted, speed.predicted_mfu),
        ("predicted for the best", speed.best, speed.predicted_mfu * speed.best / speed.predicted),
    ]
    head = f"{'':<28} {'tokens/s/GPU':>12}  {'MFU':>6}"
    return [head, *(f"{label:<28} {value:12,.0f}  {mfu:6.1%}" for label, value, mfu in rows)]


def _losses(losses: tuple[Loss, ...], step: float) -> list[str]:
    lines = ["", f"where a step of {time(step)} goes, beside the products at the chip's peak:"]
    return lines + [
        f"  {time(item.seconds):>10}  {item.seconds / step:6.1%}  {item.what} ({item.class_})" for item in losses
    ]


def _mishaps(mishaps: tuple[Mishap, ...]) -> list[str]:
    if not mishaps:
        return []
    lines = ["", "what would explain it (tokens/s/GPU that the planner then predicts), the nearest first:"]
    for item in mishaps[:_MISHAPS]:
        mark = ", about what was measured" if item.near else ""
        lines.append(f"  {item.tokens_per_second_per_gpu:10,.0f}  {item.what}{mark}")
        lines.append(f"  {'':10}    to tell: {item.check}")
    return lines


def _memory(memory: Memory) -> list[str]:
    sizes = sorted(((part, getattr(memory, part)) for part in (*PARTS, *OUTSIDE)), key=lambda item: -item[1])
    lines = [
        "",
        f"the fullest rank by the planner, {memory.event}:" if memory.event else "the fullest rank by the planner:",
    ]
    return lines + [f"  {size / GIB:8.2f} GiB  {part}" for part, size in sizes if size > 0.005 * GIB]


def _snapshot(taken: Snapshot) -> list[str]:
    lines = ["", "allocated now, by what stands in the stacks:"]
    lines += [f"  {size / GIB:8.2f} GiB  {part}" for part, size in taken.parts.items()]
    lines += ["by place:"]
    return lines + [f"  {site.size / GIB:8.2f} GiB  {site.count:6,} ×  {site.where}" for site in taken.sites]


def _remedy(remedy: Any) -> str:
    """As in a profile, and for memory: what it saves, and what it costs."""
    if remedy.gain_percent is None and remedy.memory_gib is not None:
        text = f"{remedy.change}: up to {remedy.memory_gib:+.2f} GiB reserved"
        return f"{text}; {remedy.why}" if remedy.why else text
    return remedy_line(remedy)
