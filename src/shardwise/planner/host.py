"""The host's part in a step, where `calibrate` measured it: it queues kernels; where it is late, the device waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.planner.subject import Subject
from shardwise.spec import Layout, Model
from shardwise.spec.calibration import HostLayer, HostTimes, Style


@dataclass(frozen=True)
class HostSeconds:
    """Of one layer: forward, backward, and its share of the norm and the update."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0


def host_seconds(times: HostTimes, model: Model, layout: Layout, *, moe: bool) -> HostSeconds:
    """What the host takes for one layer of this layout; where it computes itself (`serial`), what it takes beyond one
    whole, eager layer, which the kernels' own times hold already."""
    row = _row(times, _style(model, moe=moe), sharded=layout.zero >= 2, compiled=layout.compile)
    if row is None:
        return HostSeconds()
    forward, backward, update = row.forward_us, row.backward_us, row.update_us
    applies = {
        "tensor": layout.tp > 1,
        "context": layout.cp > 1,
        "expert": layout.ep > 1 and moe,
        "selective": layout.recompute == "selective",
        "full": layout.recompute not in ("none", "selective"),
    }
    every = int(layout.recompute.removeprefix("every:")) if layout.recompute.startswith("every:") else 1
    for extra in times.extras:
        if applies[extra.of]:
            share = 1 / every if extra.of == "full" else 1.0
            forward, backward = forward + share * extra.forward_us, backward + share * extra.backward_us
    if times.serial:
        plain = _row(times, _style(model, moe=moe), sharded=False, compiled=False)
        assert plain is not None
        forward, backward = forward - plain.forward_us, backward - plain.backward_us
        update -= plain.update_us
    return HostSeconds(*(1e-6 * max(0.0, value) for value in (forward, backward, update)))


def _style(model: Model, *, moe: bool) -> Style:
    if moe:
        return "experts"
    if model.qk_norm:
        return "qk_norm"
    return "gpt" if model.norm == "layernorm" else "llama"


def _row(times: HostTimes, style: Style, *, sharded: bool, compiled: bool) -> HostLayer | None:
    """The row most like it: compiled or not above all, then sharded or not, then the style."""
    alike = [row for row in times.layers if row.compiled is compiled] or list(times.layers)
    return max(alike, key=lambda row: (row.sharded is sharded, row.style == style, row.style == "llama"), default=None)


@dataclass
class Queue:
    """Work that the host puts in line and the device takes from it in order. `host`, `device`: when each is done."""

    host: float = 0.0
    device: float = 0.0

    def put(self, count: float, host: float, device: float) -> None:
        """`count` pieces of work, each so many seconds of either; a piece is done no sooner than it was put in line."""
        if not count:
            return
        if host >= device:
            first = max(self.device + count * device, self.host + host + (count - 1) * device)
            self.device = max(first, self.host + count * host)
        else:
            self.device = max(self.device + count * device, self.host + host + (count - 1) * device)
        self.host += count * host


def waiting_seconds(
    subject: Subject,
    host: HostTimes,
    layers: Iterable[tuple[float, HostSeconds, float, float]],
    outer: tuple[float, float],
    update: float,
) -> float:
    """How long the device waits for the host in one step without a pipeline.

    layers: of each kind, in order: how many, the host's part, and the device's forward and backward. outer: the
    device's embedding, forward and backward, and head with loss, both. A step begins where the last one's norm was
    read; the host then puts the update in line and goes on.
    """
    kinds = list(layers)
    own_update = 1e-6 * host.step_us + sum(count * seconds.update for count, seconds, *_ in kinds)
    queue = Queue()
    queue.put(1, own_update, update)
    ends = [queue.device]
    for _ in range(min(subject.micro_batches, 3)):
        queue.put(1, 1e-6 * host.first_us, 0.0)
        for count, seconds, forward, _ in kinds:
            queue.put(count, seconds.forward, forward)
        queue.put(1, 1e-6 * host.rest_us, outer[1])
        for count, seconds, _, backward in reversed(kinds):
            queue.put(count, seconds.backward, backward)
        queue.put(1, 0.0, outer[0])
        ends.append(queue.device)
    busy = update + subject.micro_batches * (
        sum(outer) + sum(count * (forward + backward) for count, _, forward, backward in kinds)
    )
    left = subject.micro_batches - (len(ends) - 1)
    return max(0.0, ends[-1] + left * (ends[-1] - ends[-2]) - busy)
