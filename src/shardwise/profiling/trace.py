"""Trace: what one rank's profiler recorded, in numpy columns, whichever profiler it was."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int32]

# What the device did.
GEMM, ATTENTION, MEMORY, COMMUNICATION, COPY = range(5)
KINDS = ("gemm", "attention", "memory", "communication", "copy")

# What the host did: an operator, a call of the driver, one of them that waits for the device, and annotations.
OPERATOR, CALL, WAIT, ANNOTATION = range(4)


@dataclass(frozen=True, eq=False)
class Device:
    """One entry per kernel or copy. On a CPU: per operator (communication on the threads that do it).

    start, end: seconds since the trace began. kind: index into KINDS. name: index into Trace.names. lane: the CUDA
    stream, or thread. launched: when the host asked for it; NaN where that was not recorded. traffic: index into
    Trace.traffics of a communication, else -1. bound: seconds that the operator would take at the chip's peak and
    memory bandwidth; NaN where its shapes or the chip are not known.
    """

    start: Seconds
    end: Seconds
    kind: npt.NDArray[np.int8]
    name: Codes
    lane: Codes
    launched: Seconds
    traffic: Codes
    bound: Seconds


@dataclass(frozen=True, eq=False)
class Host:
    """One entry per operator, call of the driver, and annotation. kind: OPERATOR, CALL, WAIT or ANNOTATION."""

    start: Seconds
    end: Seconds
    kind: npt.NDArray[np.int8]
    name: Codes
    thread: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """A kind of collective in a process group. stream: of a Timeline."""

    collective: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send_recv, broadcast, other
    group: str  # its name, and what the trainer calls it; '' where the trace does not say
    stream: str
    ranks: tuple[int, ...] = ()  # of the group, where the trace says so


@dataclass(frozen=True, eq=False)
class Trace:
    """`on_cpu`: no GPU was traced, so that operators are the work itself. `chip`: as the driver calls it."""

    source: str
    rank: int
    world: int | None
    device: Device
    host: Host
    names: tuple[str, ...]
    traffics: tuple[Traffic, ...]
    on_cpu: bool
    chip: str | None = None
    seconds: float = 0.0  # from the first event to the end of the last
    notes: tuple[str, ...] = field(default=())

    def named(self, pattern: str) -> npt.NDArray[np.bool_]:
        """Which host entries have a name in which the regular expression is found, in any case of letters."""
        return self._found(pattern)[self.host.name]

    def device_named(self, pattern: str) -> npt.NDArray[np.bool_]:
        """Likewise, of device entries."""
        return self._found(pattern)[self.device.name]

    def _found(self, pattern: str) -> npt.NDArray[np.bool_]:
        wanted = re.compile(pattern, re.IGNORECASE)
        return np.array([bool(wanted.search(name)) for name in self.names], dtype=bool)
