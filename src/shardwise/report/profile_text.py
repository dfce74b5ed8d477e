"""A Profile as text: the diagnosis first, then the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.spec.diagnosis import Diagnosis, Remedy
from shardwise.timeline import draw

if TYPE_CHECKING:
    from shardwise.profiling.profile import Profile

LABELS = {
    "compute": "compute (products, attention)",
    "memory_bound": "memory-bound kernels",
    "optimizer": "optimizer",
    "exposed_communication": "exposed communication",
    "copy": "copies, host and device",
    "checkpoint": "checkpoint stall",
    "input": "input wait",
    "recompilation": "compilation",
    "synchronisation": "after a synchronisation",
    "host": "host-bound gaps",
    "idle": "other idle time",
}
_MOST_RANKS = 16


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """The bottleneck, its evidence, and what to try."""
    lines = [
        f"bottleneck: {diagnosis.bottleneck}, {diagnosis.share:.0%} of the step "
        f"({time(diagnosis.seconds)} of {time(diagnosis.step_seconds)}, rank {diagnosis.rank})"
        if diagnosis.bottleneck != "compute"
        else f"bottleneck: compute; a step takes {time(diagnosis.step_seconds)} on rank {diagnosis.rank}"
    ]
    lines += [f"  {line}" for line in diagnosis.evidence]
    if diagnosis.remedies:
        lines.append("try:")
        lines += [f"  {number}. {remedy_line(item)}" for number, item in enumerate(diagnosis.remedies, start=1)]
    return lines


def remedy_line(remedy: Remedy) -> str:
    """'layout.zero 3 → 2: −12 % step, +1.2 GiB (modelled)'"""
    if remedy.class_ == "modelled" and remedy.gain_percent is not None:
        memory = "" if remedy.memory_gib is None else f", {remedy.memory_gib:+.1f} GiB"
        text = f"{remedy.change}: {-remedy.gain_percent:+.1f} % step{memory} (modelled)".replace("-", "−")
    elif remedy.class_ == "upper bound" and remedy.gain_percent is not None:
        text = f"{remedy.change}: at most −{remedy.gain_percent:.0f} % step"
    else:
        text = remedy.change
    return f"{text}; {remedy.why}" if remedy.why else text


def profile_lines(profile: Profile) -> list[str]:
    """Everything, as lines of at most about 120 characters."""
    return [
        *diagnosis_lines(profile.diagnosis),
        "",
        *_parts(profile),
        *_groups(profile),
        *_kernels(profile),
        *_ranks(profile),
        *_comparison(profile),
        *_recompilations(profile),
        f"one step of rank {profile.critical}:",
        draw(next(item for item in profile.timelines if item.rank == profile.critical), 80),
        *profile.notes,
    ]


def _parts(profile: Profile) -> list[str]:
    rank = next(item for item in profile.ranks if item.rank == profile.critical)
    mean = profile.mean
    steps = f"{len(rank.steps)} step{'s' * (len(rank.steps) > 1)}"
    lines = [f"rank {rank.rank}, mean of {steps} ({rank.how})" + (f", {profile.chip}" if profile.chip else "")]
    if profile.measured:
        own = profile.measured
        slower = mean.seconds / own.step_seconds - 1
        mfu = "MFU unknown (no peak of this chip)" if own.mfu is None else f"MFU {own.mfu:.1%}, HFU {own.hfu:.1%}"
        lines.append(
            f"without the profiler: {time(own.step_seconds)} a step ({slower:+.0%} under it), "
            f"{own.tokens_per_second:,.0f} tokens/s, {mfu}, input wait {own.input_fraction:.1%}"
        )
    for part, seconds in mean.parts.items():
        if seconds > 0:
            lines.append(f"  {LABELS[part]:<30} {time(seconds):>10}  {seconds / mean.seconds:6.1%}")
    return [*lines, f"  {'step':<30} {time(mean.seconds):>10}", ""]


def _groups(profile: Profile) -> list[str]:
    groups = profile.mean.by_group
    if not groups:
        return []
    lines = [f"  {'communication':<30} {'in all':>10}  {'exposed':>10}  calls a step"]
    for (collective, group), (total, exposed, count) in sorted(groups.items(), key=lambda item: -item[1][1]):
        label = collective + (f", group {group}" if group else "")
        lines.append(f"  {label:<30} {time(total):>10}  {time(exposed):>10}  {count:,}")
    return [*lines, ""]


def _kernels(profile: Profile) -> list[str]:
    if not profile.kernels:
        return []
    lines = [f"  {'slowest kernels':<74} {'a step':>10}  {'share':>6} {'calls':>7}  of roofline"]
    for kernel in profile.kernels:
        roofline = "" if kernel.roofline is None else f"{kernel.roofline:.0%}"
        share = kernel.seconds / profile.mean.seconds
        lines.append(f"  {kernel.name:<74} {time(kernel.seconds):>10}  {share:6.1%} {kernel.calls:7,.0f}  {roofline}")
    return [*lines, ""]


def _ranks(profile: Profile) -> list[str]:
    if len(profile.ranks) < 2:
        return []
    lines = [f"  rank  {'step':>10} {'device busy':>12} {'exposed':>10} {'waited':>10} {'input':>10} {'host':>10}"]
    shown = sorted(profile.ranks, key=lambda rank: -rank.mean().seconds)[:_MOST_RANKS]
    for rank in sorted(shown, key=lambda rank: rank.rank):
        mean = rank.mean()
        busy = sum(mean.parts[part] for part in ("compute", "memory_bound", "optimizer"))
        waited = "unknown" if rank.waited is None else time(sum(rank.waited) / len(rank.waited))
        mark = " ← last to come" if rank.rank == profile.critical else ""
        lines.append(
            f"  {rank.rank:>4}  {time(mean.seconds):>10} {time(busy):>12} "
            f"{time(mean.parts['exposed_communication']):>10} {waited:>10} {time(mean.parts['input']):>10} "
            f"{time(mean.parts['host']):>10}{mark}"
        )
    return [*lines, ""]


def _comparison(profile: Profile) -> list[str]:
    if not profile.comparison:
        return []
    lines = [f"  {'part of the step':<30} {'predicted':>10}  {'measured':>10}  difference"]
    for part, (predicted, measured) in profile.comparison.items():
        if predicted is None:
            lines.append(f"  {part:<30} {'–':>10}  {time(measured):>10}")
        else:
            change = f"{measured / predicted - 1:+.0%}" if predicted else ""
            lines.append(f"  {part:<30} {time(predicted):>10}  {time(measured):>10}  {change}")
    return [*lines, ""]


def _recompilations(profile: Profile) -> list[str]:
    if not profile.recompilations:
        return []
    lines = [f"{len(profile.recompilations)} compilations within the profiled steps:"]
    lines += [f"  {item.function}, {item.seconds:.2f} s: {item.reason}" for item in profile.recompilations[:5]]
    return [*lines, ""]


def time(seconds: float) -> str:
    """'1.20 s', '12.3 ms', '80 µs'."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"
