"""What every verb says beside its predictions, worded once."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from typing import Literal

from shardwise.planner.memory import capacity_bytes
from shardwise.planner.price import age_days
from shardwise.spec import Gpu, Precision
from shardwise.spec.cluster import Figure
from shardwise.spec.price import Price


def on_figures(gpu: Gpu) -> Iterator[str]:
    """Where predictions on this chip come from, and what nobody knows about it."""
    found, link = gpu.calibration, gpu.intra
    if found is None:
        yield f"time and memory are modelled, not measured: shardwise on {gpu.name}"
    else:
        yield f"compute is calibrated, memory modelled: {found.source} ({found.date})"
    if communication_class(gpu) == "measured" and link is not None:
        yield f"communication within {gpu.name} is measured: {link.source} ({link.date})"
    elif found is not None:
        yield f"communication is modelled: links of {gpu.name} were not calibrated"
    for origin in sorted({f"{item.source} ({item.date})" for item in gpu.peak_tflops.values() if _measured(item)}):
        yield f"the figures of {gpu.name} are measured: {origin}"
    if capacity_bytes(gpu) is None:
        yield f"how much memory {gpu.name} has is unknown, and so is whether a layout fits"


def compute_class(gpu: Gpu) -> Literal["modelled", "calibrated"]:
    """Of figures about one chip's time."""
    return "calibrated" if gpu.calibration else "modelled"


def communication_class(gpu: Gpu) -> Literal["modelled", "measured"]:
    """Of figures about exchanges, which stay modelled until `calibrate` measured the link on this machine."""
    calibrated = gpu.calibration is not None and gpu.calibration.ranks > 1
    return "measured" if calibrated and gpu.intra is not None and gpu.intra.class_ == "measured" else "modelled"


def _measured(figure: Figure) -> bool:
    return figure.class_ == "measured"


def on_price(offer: Price, today: datetime.date) -> str:
    """An offer, and how old it is."""
    age = "read today with gpuhunt" if offer.source == "gpuhunt" else f"{age_days(offer, today)} days old"
    return f"price: {offer.usd_per_gpu_hour} USD per GPU-hour at {offer.provider} ({offer.kind}), {age}"


def on_precisions(own: Precision, others: Iterable[Precision]) -> Iterator[str]:
    """What narrower products than the Run's ask for. Wider ones risk nothing."""
    for other in others:
        if other != own and other.compute not in ("fp32", "fp64"):
            yield (
                f"{other.name} instead of {own.name} changes what is learned: validate it first, by the loss of a "
                "short run in either"
            )
