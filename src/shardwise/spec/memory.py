"""Memory: what one rank holds at its peak, by part."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_serializer, model_validator

from shardwise.spec.noun import Noun

GIB = 2**30
MemoryClass = Literal["closed-form", "traced", "calibrated", "measured"]
PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "transient")
OUTSIDE = ("communication", "outside")


class Memory(Noun):
    """Bytes of one rank at the moment of its peak. Predicted, rehearsed and measured use the same parts.

    The parts up to `transient` are tensors, and sum to `live`. `reserved` is what the allocator takes from the driver
    for them, as a band (low, mid, high), because it depends on fragmentation. `communication` (NCCL's buffers) and
    `outside` (CUDA context, loaded kernels, libraries) come on top of it. Dumped in GiB.
    """

    rank: int = 0  # in the world
    stage: int = 0  # the rank's place in the pipeline
    class_: MemoryClass = Field(default="closed-form", alias="class")
    overhead_class: Literal["modelled", "calibrated", "measured"] = "modelled"  # of reserved, communication, outside
    event: str = ""  # where in the step the peak is
    parameters: float = 0.0  # what the optimizer updates, and copies kept for good
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0  # unsharded or cast weights and their gradients in flight, with the collectives' buffers
    activations: float = 0.0  # saved for the backward
    logits: float = 0.0  # logits and loss
    transient: float = 0.0  # temporaries of the operator at the peak
    reserved: tuple[float, float, float]
    communication: float = 0.0
    outside: float = 0.0

    @property
    def live(self) -> float:
        """The peak of what the allocator has handed out."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def used(self) -> tuple[float, float, float]:
        """What the driver shows as used (nvidia-smi): low, mid, high."""
        beside = self.communication + self.outside
        low, mid, high = self.reserved
        return low + beside, mid + beside, high + beside

    @model_validator(mode="before")
    @classmethod
    def _from_dump(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "parts_gib" not in data:
            return data
        data = dict(data)
        parts = {part: size * GIB for part, size in data.pop("parts_gib").items()}
        reserved = [size * GIB for size in data.pop("reserved_gib")]
        for derived in ("live_gib", "used_gib"):
            data.pop(derived, None)
        return {**data, **parts, "reserved": reserved}

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if not self.live <= self.reserved[0] * (1 + 1e-9) or list(self.reserved) != sorted(self.reserved):
            raise ValueError("reserved must be at least live, and its band must ascend")
        return self

    @model_serializer
    def _in_gib(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "stage": self.stage,
            "class": self.class_,
            "overhead_class": self.overhead_class,
            "event": self.event,
            "live_gib": self.live / GIB,
            "reserved_gib": [size / GIB for size in self.reserved],
            "used_gib": [size / GIB for size in self.used],
            "parts_gib": {part: getattr(self, part) / GIB for part in PARTS + OUTSIDE},
        }
