"""What a step loses, cause by cause, and which of them is the bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.profiling.breakdown import RankParts, StepParts
from shardwise.profiling.ranks import Straggler
from shardwise.profiling.stall import Stall
from shardwise.profiling.trace import Trace

WORTH = 0.05  # share of the step below which a loss is no bottleneck
_REACHABLE = 0.8  # of the roofline, for large products (best-shape rates of `BASELINES.md`)
_FUSABLE = 0.5  # of memory-bound time that fusing (torch.compile) typically removes: reads and writes in between

_DEVICE_CAUSES = {
    "input": "input",
    "checkpoint": "checkpoint",
    "recompilation": "recompilation",
    "synchronisation": "synchronisation",
    "host": "host-bound",
    "copy": "copies",
}


@dataclass(frozen=True)
class Losses:
    """`seconds`: of the step of the critical rank, by cause, the largest first."""

    rank: RankParts
    mean: StepParts
    seconds: dict[str, float]
    straggler: Straggler | None
    roofline: float | None
    stall: Stall | None = None  # the longest wait for the host

    @property
    def one_stall(self) -> bool:
        """Whether most of the wait for the host is a single one: then no setting of the layout explains it."""
        waits = self.rank.mean().parts
        steps = len(self.rank.steps)
        return self.stall is not None and self.stall.seconds > 0.5 * steps * (waits["host"] + waits["synchronisation"])

    @property
    def bottleneck(self) -> str:
        """The largest loss, or 'compute' where none is worth naming."""
        cause = next(iter(self.seconds), "compute")
        return cause if self.seconds.get(cause, 0.0) > WORTH * self.mean.seconds else "compute"


def weigh(
    rank: RankParts,
    straggler: Straggler | None,
    roofline: float | None,
    compilation_seconds: float = 0.0,
    stall: Stall | None = None,
) -> Losses:
    """compilation_seconds: per step, where the compiler itself said so and the trace does not show it."""
    mean = rank.mean()
    losses = {cause: mean.parts[part] for part, cause in _DEVICE_CAUSES.items()}
    if compilation_seconds > losses["recompilation"]:
        more = min(compilation_seconds - losses["recompilation"], losses["host-bound"])
        losses["recompilation"] += more
        losses["host-bound"] -= more
    for stream, seconds in mean.exposed.items():
        name = "bubble" if stream == "pipeline" else f"exposed {stream}"
        losses[name] = losses.get(name, 0.0) + seconds
    losses["memory-bound"] = _FUSABLE * (mean.parts["memory_bound"] - mean.packing)
    if roofline is not None:
        losses["kernels below roofline"] = mean.gemm * max(0.0, 1 - roofline / _REACHABLE)
    if straggler is not None:
        losses["straggler"] = max(0.0, min(straggler.waited, straggler.late))
    ordered = sorted(losses.items(), key=lambda item: -item[1])
    return Losses(rank, mean, {cause: seconds for cause, seconds in ordered if seconds > 0}, straggler, roofline, stall)


def evidence(losses: Losses, trace: Trace, ranks: Sequence[RankParts]) -> list[str]:
    """Figures behind the bottleneck, each a sentence."""
    mean, cause = losses.mean, losses.bottleneck
    seconds = losses.seconds.get(cause, 0.0)
    share = seconds / mean.seconds
    texts = {
        "input": f"the device waits {ms(seconds)} of each step ({share:.0%}) while the host fetches input",
        "checkpoint": f"the device stands still for {ms(seconds)} a step ({share:.0%}) while a checkpoint is saved",
        "recompilation": f"compiling takes {ms(seconds)} a step ({share:.0%}), after warm-up",
        "synchronisation": (
            f"{ms(seconds)} a step ({share:.0%}) the device stands still after the host had waited for it: nothing "
            "was queued"
        ),
        "host-bound": _host_bound(mean, seconds, trace),
        "bubble": f"{ms(seconds)} a step ({share:.0%}) pass in sends and receives that no compute covers",
        "copies": f"copies between host and device stick out by {ms(seconds)} a step ({share:.0%})",
        "memory-bound": (
            f"{ms(mean.parts['memory_bound'])} a step ({mean.share('memory_bound'):.0%}) go to kernels that only move "
            f"memory, against {ms(mean.parts['compute'])} of products and attention; fusing typically saves half"
        ),
        "kernels below roofline": (
            f"matrix products take {ms(mean.gemm)} a step and reach {losses.roofline or 0:.0%} of what the chip allows "
            "for their shapes"
        ),
        "compute": f"no loss is worth {WORTH:.0%} of the step: {mean.share('compute'):.0%} of it is compute",
    }
    if cause.startswith("exposed "):
        stream = cause.removeprefix("exposed ")
        total = mean.communication.get(stream, 0.0)
        lines = [
            f"{ms(seconds)} a step ({share:.0%}) of {stream} communication stick out of compute, of {ms(total)} in all"
        ]
        lines += _groups(mean)
        if stream in ("all_gather", "reduce_scatter") and mean.packing > 0.01 * mean.seconds:
            lines.append(f"FSDP's copies into and out of its buffers take {ms(mean.packing)} beside it")
    elif cause == "straggler":
        assert losses.straggler is not None
        lines = [
            f"the other ranks wait {ms(losses.straggler.waited)} a step for rank {losses.straggler.rank}, whose device "
            f"is busy {ms(losses.straggler.late)} longer than theirs"
        ]
    else:
        lines = [texts[cause]]
    if len(ranks) > 1 and cause in ("input", "host-bound", "checkpoint"):
        part = {"host-bound": "host"}.get(cause, cause)
        others = [rank.mean().parts[part] for rank in ranks if rank is not losses.rank]
        lines.append(
            f"rank {losses.rank.rank} is the last to come; on the others it is {ms(sum(others) / len(others))}"
        )
    if cause in ("host-bound", "synchronisation") and losses.stall:
        lines += _stall(losses, losses.stall)
    lines.append(_next(losses))
    return [line for line in lines if line]


def _host_bound(mean: StepParts, seconds: float, trace: Trace) -> str:
    busy = sum(mean.parts[part] for part in ("compute", "memory_bound", "optimizer"))
    if trace.on_cpu:
        share = seconds / mean.seconds
        return f"{ms(seconds)} a step ({share:.0%}) no operator runs: Python between {mean.launches:,} of them"
    return (
        f"{ms(seconds)} a step ({seconds / mean.seconds:.0%}) the device waits for its next kernel to be launched: "
        f"{mean.launches:,} launches a step, of {busy / max(1, mean.launches) * 1e6:.0f} µs on average"
    )


def _stall(losses: Losses, stall: Stall) -> list[str]:
    where = f", while the host was in {stall.within}" if stall.within else ""
    if losses.one_stall:
        return [f"most of it is one wait of {ms(stall.seconds)}{where}"]
    return [f"the longest wait: {ms(stall.seconds)}{where}"]


def _groups(mean: StepParts) -> list[str]:
    rows = sorted(mean.by_group.items(), key=lambda item: -item[1][1])[:2]
    return [
        f"{collective}{f' in group {group}' if group else ''}: {count} a step, {ms(total)} in all, "
        f"{ms(exposed)} exposed"
        for (collective, group), (total, exposed, count) in rows
        if exposed
    ]


def _next(losses: Losses) -> str:
    others = [(cause, seconds) for cause, seconds in losses.seconds.items() if cause != losses.bottleneck][:2]
    words = [f"{cause} {ms(seconds)}" for cause, seconds in others if seconds > 0.01 * losses.mean.seconds]
    return f"next: {', '.join(words)}" if words else ""


def ms(seconds: float) -> str:
    """'12.3 ms', '1.20 s', '80 µs'."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"
