"""What a CUDA out-of-memory message says.

Texts: c10/cuda/CUDACachingAllocator.cpp of pytorch 1.10 to 2.13 ("Tried to allocate … GPU 0 has a total capacity of …",
before 2.1 "(GPU 0; … total capacity; … already allocated; …)").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.spec import InputError

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_SIZE = r"([\d.]+)\s*(bytes|[KMGT]iB|[KMG]B)"
_FIELDS = {
    "tried": rf"[Tt]ried to allocate {_SIZE}",
    "total": rf"(?:total capacity of {_SIZE}|{_SIZE} total capacity)",
    "free": rf"(?:of which {_SIZE} is free|{_SIZE} free)",
    "in_use": rf"this process has {_SIZE} memory in use",
    "allocated": rf"(?:{_SIZE} is allocated by PyTorch|{_SIZE} already allocated)",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
    "pools": rf"with {_SIZE} allocated in private pools",
}


@dataclass(frozen=True)
class OutOfMemory:
    """Bytes; None where the message does not say. in_use: by this process, on the device. pools: of CUDA graphs.
    count: how many such messages the text holds; the figures are of the first."""

    tried: float
    total: float | None
    free: float | None
    in_use: float | None
    allocated: float | None
    reserved: float | None
    pools: float | None
    count: int = 1

    @property
    def unallocated(self) -> float | None:
        """Reserved by the allocator, and in no tensor."""
        if self.reserved is None or self.allocated is None:
            return None
        return self.reserved - self.allocated

    @property
    def outside(self) -> float | None:
        """Of this process, not the allocator's: context, kernels, communicators."""
        if self.in_use is None or self.reserved is None:
            return None
        return self.in_use - self.reserved

    @property
    def others(self) -> float | None:
        """Used by other processes, or by the driver."""
        if self.total is None or self.free is None or self.in_use is None:
            return None
        return max(0.0, self.total - self.free - self.in_use)

    @property
    def fragmented(self) -> bool:
        """Whether what is reserved and in no tensor would have sufficed, had it been in one piece."""
        return self.unallocated is not None and self.unallocated >= self.tried

    @property
    def short(self) -> float:
        """Bytes that were missing, at the least."""
        return max(0.0, self.tried - (self.free or 0.0))


def parse_oom(text: str, source: str) -> OutOfMemory:
    """The first such message in a log. Raises InputError where there is none."""
    starts = [found.start() for found in re.finditer(r"[Tt]ried to allocate", text)]
    if not starts:
        raise InputError(f"--oom {source}: no CUDA out-of-memory message in it ('… Tried to allocate …')")
    message = text[starts[0] : starts[0] + 1500]
    if len(starts) > 1:
        message = message[: starts[1] - starts[0]]
    sizes = {name: _size(pattern, message) for name, pattern in _FIELDS.items()}
    tried = sizes.pop("tried")
    unallocated, reserved = sizes.pop("unallocated"), sizes["reserved"]
    if tried is None:
        raise InputError(f"--oom {source}: the size after 'Tried to allocate' cannot be read")
    if reserved is None and unallocated is not None and sizes["allocated"] is not None:
        sizes["reserved"] = sizes["allocated"] + unallocated
    return OutOfMemory(tried, **sizes, count=len(starts))


def _size(pattern: str, text: str) -> float | None:
    found = re.search(pattern, text)
    if not found:
        return None
    number, unit = [item for item in found.groups() if item is not None][:2]
    try:
        return float(number) * _UNITS[unit]
    except ValueError:
        return None
