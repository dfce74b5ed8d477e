"""What offloading to the host costs: bytes over the chip's host link, AdamW on the host's cores, and the host's memory.

Nothing here was measured: the links are PCIe's data-sheet rates (`spec/presets/links.yaml`), the hosts NVIDIA's own
systems. So no copy is taken to hide behind compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.compute import ADAMW_BYTES
from shardwise.planner.memory import Verdict, verdict
from shardwise.planner.memory.predict import kept_of_block
from shardwise.planner.parameters import layer_parameters, outer_parameters
from shardwise.planner.stacks import generation
from shardwise.planner.subject import Subject
from shardwise.spec.memory import Memory
from shardwise.spec.presets import link_preset

_OLD = ("ampere", "ada")  # with PCIe 4.0; all later generations have at least 5.0
# A chip's share of the host's memory, GB/s and GB: an eighth of DGX A100's (two EPYC 7742 with 8 × DDR4-3200 each,
# 1 TB), and of DGX H100's (two Xeon 8480C with 8 × DDR5-4800 each, 2 TB), which all later hosts are taken for.
_OLD_HOST = (2 * 204.8 / 8, 1000 / 8)
_HOST = (2 * 307.2 / 8, 2000 / 8)


@dataclass(frozen=True)
class Copies:
    """Seconds that one layer and micro-batch spends on copies to and from the host."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def both(self) -> float:
        return self.forward + self.backward


def layer_copies(subject: Subject, *, moe: bool, parameters: float) -> Copies:
    """Of one layer. parameters: those that the rank computes with, before any sharding over data ranks.

    activations: what the layer keeps goes out in the forward and comes back in the backward. parameters: the rank's
    fp32 share comes in for every gather: in the forward, and in the backward unless zero 2 keeps what it gathered.
    """
    layout = subject.layout
    if layout.offload == "activations":
        seconds = _link_seconds(subject, _kept(subject, moe=moe))
        return Copies(seconds, seconds)
    if layout.offload == "parameters":
        shards = layout.dp_shard * layout.cp if layout.zero >= 2 else 1
        seconds = _link_seconds(subject, 4 * parameters / shards)
        return Copies(seconds, 0.0 if layout.zero == 2 else seconds)
    return Copies()


def updated_parameters(subject: Subject) -> float:
    """Those whose optimizer state the rank holds."""
    layout = subject.layout
    held = layer_parameters(subject.model, layout, subject.model.layers - 1) * subject.model.layers / layout.pp
    held += outer_parameters(subject.model, layout)
    sharded = layout.dp_shard * layout.cp if layout.zero else 1
    if layout.zero == 1:
        sharded = layout.data_ranks * layout.cp
    return held / sharded


def step_copies(subject: Subject, updated: float) -> float:
    """Seconds once a step, for the `updated` parameters of this rank: their gradients go out, and unless the host also
    holds them they come back, all in fp32."""
    if subject.layout.offload not in ("optimizer", "parameters"):
        return 0.0
    return _link_seconds(subject, (4 if subject.layout.offload == "parameters" else 8) * updated)


def host_update_seconds(subject: Subject, updated: float) -> float:
    """AdamW on the host, as fast as its memory."""
    return ADAMW_BYTES * updated / (_host(subject)[0] * 1e9)


def verdict_of(subject: Subject, memory: Memory) -> Verdict:
    """Of the chip's memory, and `oom` where the host's does not hold what is offloaded to it."""
    if subject.layout.offload != "none" and host_bytes(subject) > _host(subject)[1] * 1e9:
        return "oom"
    return verdict(memory, subject.cluster.gpu)


def host_bytes(subject: Subject) -> float:
    """What one rank offloads: 12 bytes per parameter whose state it holds (gradient and moments in fp32), 16 with the
    parameter; or what its layers keep, of as many micro-batches as 1F1B has in flight: one for each pipeline rank."""
    layout, model = subject.layout, subject.model
    if layout.offload != "activations":
        return (16 if layout.offload == "parameters" else 12) * updated_parameters(subject)
    return sum(
        _kept(subject, moe=model.experts is not None and layer >= model.experts.dense_layers)
        for layer in range(model.layers)
    )


def _host(subject: Subject) -> tuple[float, float]:
    return _OLD_HOST if generation(subject.cluster.gpu) in _OLD else _HOST


def _kept(subject: Subject, *, moe: bool) -> float:
    """Bytes that one layer keeps of a micro-batch."""
    layout = subject.layout
    none, some = kept_of_block(subject, layout.micro_batch * subject.sequence / layout.cp, moe=moe)
    share = subject.recompute.gemm if layout.recompute.startswith("every:") else 1.0
    return share * some + (1 - share) * none


def _link_seconds(subject: Subject, payload: float) -> float:
    link = link_preset("pcie4" if generation(subject.cluster.gpu) in _OLD else "pcie5")
    return payload / link.bytes_per_second(payload) if payload else 0.0
