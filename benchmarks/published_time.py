"""Step times: what a row measured, what the planner predicts, and what two simple methods would have said."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.published_rows import Row, Unusable, source_of, subject_of

from shardwise.planner.flops import model_flops_per_token
from shardwise.planner.stacks import generation
from shardwise.planner.step import StepTime, predict_step
from shardwise.planner.subject import Subject

CONSTANT_MFU = 0.40


@dataclass(frozen=True)
class Timed:
    """One row: measured seconds of a step, and the three predictions."""

    row: Row
    subject: Subject
    measured: float
    step: StepTime
    constant: float
    nearest: float = math.nan

    @property
    def source(self) -> str:
        return source_of(self.row)

    def errors(self) -> dict[str, float]:
        predicted = {"planner": self.step.seconds, "constant_mfu": self.constant, "nearest_row": self.nearest}
        return {name: seconds / self.measured - 1 for name, seconds in predicted.items() if not math.isnan(seconds)}


def time_rows(rows: list[Row]) -> tuple[list[Timed], dict[str, str]]:
    """The rows whose step time can be predicted and compared, and why the others cannot, by id."""
    timed, unusable = [], {}
    for row in rows:
        try:
            subject = subject_of(row)
            measured = measured_seconds(row, subject)
            timed.append(Timed(row, subject, measured, predict_step(subject), _ideal_seconds(subject) / CONSTANT_MFU))
        except Unusable as reason:
            unusable[row["id"]] = str(reason)
    places = [_place(item.subject) for item in timed]
    return [_with_nearest(item, place, timed, places) for item, place in zip(timed, places, strict=True)], unusable


def measured_seconds(row: Row, subject: Subject) -> float:
    """Seconds of a step: printed, from printed throughput, or from printed FLOP/s where the row says how it counts
    FLOPs. Raises Unusable."""
    measured, tokens = row["measured"], row["layout"]["global_batch"] * row["model"]["seq"]
    gpus = row["hardware"]["gpus"]
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    if measured.get("tokens_per_s_per_gpu"):
        return float(tokens / (measured["tokens_per_s_per_gpu"] * gpus))
    if measured.get("samples_per_s"):
        return float(row["layout"]["global_batch"] / measured["samples_per_s"])
    if (row.get("derived") or {}).get("step_time_s"):  # the collection's own arithmetic on what is printed
        return float(row["derived"]["step_time_s"])
    flops = (measured.get("tflops_per_gpu") or 0) * 1e12
    if not flops and measured.get("mfu"):
        if subject.dtype != "bf16":  # some divide by the bf16 peak, some by the dtype's own
            raise Unusable("only an MFU printed, of a precision whose peak is not stated")
        flops = measured["mfu"] * _peak(subject)
    if not flops:
        raise Unusable("step time not measured")
    return tokens * _printed_flops_per_token(row, subject) / (flops * gpus)


def _printed_flops_per_token(row: Row, subject: Subject) -> float:
    """FLOPs per token as the row's source counts them; planning notes, section 2. Raises Unusable."""
    notes = (row.get("mfu_notes") or "").lower()
    stated = (row.get("derived") or {}).get("attn_counting") or notes
    if "not stated" in stated or stated == "other":
        raise Unusable("only FLOP/s printed, and how attention is counted is not stated")
    half = any(word in stated for word in ("causal-half", "halves the attention", "causal half"))
    if not half and "full" not in stated:
        raise Unusable("only FLOP/s printed, and how attention is counted is not stated")
    flops = model_flops_per_token(subject.model, subject.sequence, causal=half)
    recomputes = any(word in notes for word in ("includes the recompute", "incl. recompute", "with recompute"))
    return flops * (4 / 3 if recomputes and subject.recompute.gemm == 1 else 1)


def _peak(subject: Subject) -> float:
    """Dense peak of the row's dtype, FLOP/s; subject_of has made sure that it is known."""
    peak = subject.cluster.gpu.peak_flops(subject.dtype.split("-")[0])
    assert peak is not None
    return peak


def _ideal_seconds(subject: Subject) -> float:
    """A step at an MFU of 1: attention counted full, as published MFUs mostly do."""
    tokens = subject.layout.micro_batch * subject.micro_batches * subject.layout.data_ranks * subject.sequence
    flops = tokens * model_flops_per_token(subject.model, subject.sequence, causal=False)
    return flops / (_peak(subject) * subject.cluster.gpus)


Place = tuple[float, float, float, str, str]


def _with_nearest(item: Timed, place: Place, timed: list[Timed], places: list[Place]) -> Timed:
    """The MFU of the nearest row of another source, applied to this one."""
    others = [
        (_distance(place, its), index)
        for index, (other, its) in enumerate(zip(timed, places, strict=True))
        if other.source != item.source
    ]
    if not others:
        return item
    near = timed[min(others)[1]]
    mfu = _ideal_seconds(near.subject) / near.measured
    return replace(item, nearest=_ideal_seconds(item.subject) / mfu)


def _place(subject: Subject) -> Place:
    """Natural logs of active parameters, GPUs and sequence; chip generation; dtype."""
    active = model_flops_per_token(subject.model, 1) / 6
    gpu = subject.cluster.gpu
    return (
        math.log(active),
        math.log(subject.cluster.gpus),
        math.log(subject.sequence),
        generation(gpu),
        subject.dtype,
    )


def _distance(one: Place, other: Place) -> float:
    """In logs of parameters; GPUs and sequence count half, another generation 2, another dtype 1."""
    numbers = abs(one[0] - other[0]) + 0.5 * abs(one[1] - other[1]) + 0.5 * abs(one[2] - other[2])
    return numbers + 2.0 * (one[3] != other[3]) + 1.0 * (one[4] != other[4])
