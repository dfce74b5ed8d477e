"""Where the missing MFU of a run most probably is: the planner's parts of its step, what its layout costs against the
best one, and which common mishap would explain the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.planner.flops import model_flops_per_token
from shardwise.planner.search import Found
from shardwise.planner.step import predict_step
from shardwise.planner.subject import Subject
from shardwise.spec import Gpu, InputError
from shardwise.spec.cluster import Link

_LAUNCHES = 130  # kernels of a layer's forward and backward in eager mode, roughly
_HOST_SECONDS = 7e-6  # that the host takes for one of them, roughly
_NEAR = 0.15  # a mishap whose speed is this near the measured one (as a log ratio) explains it


@dataclass(frozen=True)
class Loss:
    """Seconds of the measured step. class_: 'modelled' (the planner's part), 'measured' (what it does not explain)."""

    what: str
    seconds: float
    class_: str


@dataclass(frozen=True)
class Mishap:
    """Something that goes wrong often, and what the planner predicts then. near: whether that is about the measured
    speed."""

    what: str
    check: str  # how to tell
    tokens_per_second_per_gpu: float
    near: bool


def account(found: Found, tokens_per_second: float) -> list[Loss]:
    """The measured step part by part, the largest first; `tokens_per_second` of the whole cluster. What the planner
    predicts beyond the measured time is left away in proportion."""
    subject, parts = found.subject, found.step.parts
    tokens = found.tokens_per_second * found.step.seconds
    measured = tokens / tokens_per_second
    peak = subject.cluster.gpu.peak_flops(subject.dtype) or math.nan
    ideal = tokens * model_flops_per_token(subject.model, subject.sequence) / (peak * subject.cluster.gpus)
    names = {
        "recompute": "recomputation",
        "tensor": "exposed tensor-parallel communication",
        "context": "exposed context-parallel communication",
        "expert": "exposed expert-parallel communication",
        "data": "exposed data-parallel communication",
        "offload": "copies to and from the host",
        "bubble": "pipeline bubble",
        "optimizer": "optimizer",
    }
    slower = max(0.0, parts["compute"] - ideal)
    modelled = {"kernels below the chip's peak, and memory-bound work": slower}
    modelled |= {label: parts[part] for part, label in names.items()}
    scale = min(1.0, measured / found.step.seconds)
    rows = [Loss(what, seconds * scale, "modelled") for what, seconds in modelled.items() if seconds > 0]
    if measured > found.step.seconds:
        rows.append(Loss("not explained by the model", measured - found.step.seconds, "measured"))
    return sorted(rows, key=lambda row: -row.seconds)


def mishaps(found: Found, tokens_per_second: float) -> list[Mishap]:
    """Nearest to the measured speed first; only those that would make the run slower than predicted."""
    per_gpu = tokens_per_second / found.subject.cluster.gpus
    tokens = found.tokens_per_second * found.step.seconds / found.subject.cluster.gpus
    result = []
    for what, check, seconds in _suppose(found):
        if seconds <= found.step.seconds * 1.02:
            continue
        speed = tokens / seconds
        result.append(Mishap(what, check, speed, abs(math.log(speed / per_gpu)) < _NEAR))
    return sorted(result, key=lambda item: abs(math.log(item.tokens_per_second_per_gpu / per_gpu)))


def _suppose(found: Found) -> Iterator[tuple[str, str, float]]:
    """What, how to tell, and the step's seconds then."""
    subject, layout = found.subject, found.layout
    stack, gpu = subject.stack, subject.cluster.gpu
    if layout.world > 1:
        alone = replace(stack, hides_data=0.0, hides_tensor=0.0, hides_context=0.0, hides_expert=0.0)
        yield (
            "no communication is hidden behind compute",
            "profile: exposed equals communication; prefetch off, CUDA_DEVICE_MAX_CONNECTIONS, one stream",
            _seconds(replace(subject, stack=alone)),
        )
    if layout.world > gpu.domain and gpu.inter is not None:
        yield (
            "the network runs at a tenth of its rate (TCP instead of RDMA)",
            "NCCL_DEBUG=INFO must say NET/IB or EFA, not NET/Socket; nccl-tests between two nodes",
            _seconds(_with_link(subject, "inter", gpu.inter, 0.1)),
        )
        yield (
            "the network runs at half its rate",
            "nccl-tests between two nodes; half of the NICs unused (NCCL_IB_HCA), a congested fabric",
            _seconds(_with_link(subject, "inter", gpu.inter, 0.5)),
        )
    if layout.world > 1 and gpu.intra is not None and gpu.domain > 1:
        yield (
            "the links within a node run at a tenth (PCIe instead of NVLink)",
            "nvidia-smi topo -m and nvidia-smi nvlink -s; NCCL_P2P_DISABLE must not be set",
            _seconds(_with_link(subject, "intra", gpu.intra, 0.1)),
        )
    if subject.dtype != "fp32" and gpu.peak_flops("fp32"):
        yield (
            "products run in fp32 instead of " + subject.dtype,
            "the profile's slowest kernels name s1688 or sgemm; autocast or the cast of weights is missing",
            _seconds(replace(subject, dtype="fp32")),
        )
    slow = replace(stack, attention={**stack.attention, **{family: share / 6 for family, share in _all(stack)}})
    yield (
        "attention falls back to a slow kernel",
        "the profile shows softmax and bmm kernels instead of flash or cuDNN attention: a mask, or head_dim",
        _seconds(replace(subject, stack=slow)),
    )
    launches = subject.micro_batches * subject.model.layers / layout.pp * _LAUNCHES
    yield (
        f"the host cannot launch fast enough (about {launches:,.0f} kernels a step)",
        "the device is idle between kernels: a larger micro_batch, compile; `shardwise profile` tells",
        max(found.step.seconds, launches * _HOST_SECONDS),
    )
    for loss in (1.1, 2.0):
        yield (
            f"clocks {'10 %' if loss == 1.1 else '50 %'} lower: power or heat",
            "nvidia-smi -q -d CLOCK,PERFORMANCE while it trains",
            found.step.seconds + (loss - 1) * (found.step.parts["compute"] + found.step.parts["recompute"]),
        )
    yield (
        "the device waits for input a third of the time",
        "shardwise's data_wait_fraction; `shardwise profile`; more reader workers",
        found.step.seconds * 1.5,
    )


def _all(stack: object) -> list[tuple[str, float]]:
    families: dict[str, float] = {"other": 0.35, **stack.attention}  # type: ignore[attr-defined]
    return list(families.items())


def _seconds(subject: Subject) -> float:
    try:
        return predict_step(subject).seconds
    except InputError:  # no such rate of the chip
        return 0.0


def _with_link(subject: Subject, field: str, link: Link, share: float) -> Subject:
    """The same cluster with a link at a share of its bandwidth."""
    curves = {
        name: tuple((size, rate * share) for size, rate in getattr(link, name)) for name in ("curve", "reduce_curve")
    }
    gpu: Gpu = subject.cluster.gpu.model_copy(update={field: link.model_copy(update=curves)})
    return replace(subject, cluster=subject.cluster.model_copy(update={"gpu": gpu}))
