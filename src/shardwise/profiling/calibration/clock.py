"""How long device work takes, without the host's part in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

_ENOUGH = 2e-3  # seconds of work between two looks at the clock
_MOST = 20  # calls
_BUSY = 1e-3  # seconds of a product of 8192³ on the fastest of chips; the host queues the rest meanwhile


class Clock:
    """Times work on one device. `together`: all ranks begin each measurement at once, and share what they share in
    training; their slowest counts."""

    def __init__(self, device: torch.device, *, quick: bool = False, together: bool = False):
        self.device, self._repeats, self._together = device, 3 if quick else 5, together
        self._cuda = device.type == "cuda"
        self._busy: Tensor | None = None
        if self._cuda:
            self._busy = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def seconds(self, work: Callable[[], object], *, keeps: bool = False) -> float:
        """The median time of one call, after two that do not count. What `work` returns is dropped; keeps: on a CPU not
        before the other calls are done, as with what a forward leaves for the backward, since fresh memory costs time
        there."""
        work()
        queued = self._queue_seconds(work)
        calls = self._calls(self._once(work, 1, queued, keeps))
        taken = statistics.median(self._once(work, calls, queued, keeps) for _ in range(self._repeats))
        return self._slowest(taken)

    def _queue_seconds(self, work: Callable[[], object]) -> float:
        """What the host takes to queue one call."""
        if not self._cuda:
            return 0.0
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def rest(self) -> None:
        """Give up what the clock itself holds on the device."""
        self._busy = None

    def host_seconds(self, work: Callable[[], object]) -> float:
        """The median time of one call as the host sees it, until the device is done too."""
        taken = []
        for _ in range(4 + 4 * self._repeats):
            if self._together:
                dist.barrier()
            if self._cuda:
                torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            work()
            if self._cuda:
                torch.cuda.synchronize(self.device)
            taken.append(time.perf_counter() - began)
        return self._slowest(statistics.median(taken[4:]))

    def _calls(self, one: float) -> int:
        calls = max(1, min(_MOST, int(_ENOUGH / max(one, 1e-9))))
        return int(self._slowest(calls))  # ranks agree

    def _once(self, work: Callable[[], object], calls: int, queued: float, keeps: bool) -> float:
        if self._together:
            dist.barrier()
        if not self._cuda:
            kept = list[object]()
            began = time.perf_counter()
            for _ in range(calls):
                if keeps:
                    kept.append(work())
                else:
                    work()
            return (time.perf_counter() - began) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(min(40, 1 + int(1.5 * calls * queued / _BUSY))):
            torch.mm(self._busy, self._busy)
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    def _slowest(self, value: float) -> float:
        if not self._together:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.item()


class Pool:
    """Random numbers to compute with: three buffers, of which each tensor is a view, so that nothing is drawn twice."""

    def __init__(self, device: torch.device, dtype: torch.dtype, elements: int):
        self.elements = elements
        self._buffers = [torch.randn(elements, device=device, dtype=dtype) for _ in range(3)]

    def take(self, which: int, *shape: int) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        return self._buffers[which][:count].view(shape)


def backward_of(outputs: Tensor | tuple[Tensor, ...], inputs: list[Tensor]) -> Callable[[], object]:
    """A function that computes the gradients of a graph once more each time it is called."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.randn_like(output) if output.ndim else torch.ones_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
