"""How long ranks take to exchange data: a latency per hop, and bandwidth by message size and link."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.spec import Gpu
from shardwise.spec.cluster import Exchange


@dataclass(frozen=True)
class Group:
    """`ranks` chips that communicate; `local` of them share a fast-link domain."""

    ranks: int
    local: int

    @property
    def domains(self) -> int:
        return -(-self.ranks // self.local)


def group_of(gpu: Gpu, ranks: int, stride: int) -> Group:
    """The group of `ranks` chips that stand `stride` apart in rank order."""
    return Group(ranks, max(1, min(ranks, gpu.domain // stride)))


def ring_seconds(gpu: Gpu, group: Group, payload: float, kind: Exchange = "gather") -> float:
    """All-gather or reduce-scatter of `payload` bytes in all (the gathered size), or all-reduce of `payload` bytes.

    Bytes over a link: (n-1)/n of the payload, twice for all-reduce. Between domains each local member drives its own
    NIC, so the inter-domain rate is shared by `local` of them; the slower of the two links counts.
    """
    n = group.ranks
    if n == 1 or payload == 0 or gpu.intra is None:
        return 0.0
    factor = (2 if kind == "all_reduce" else 1) * (n - 1) / n
    rate = gpu.intra.bytes_per_second(payload, kind) if group.local > 1 else math.inf
    hops = math.log2(n) * gpu.intra.latency_us
    if group.domains > 1 and gpu.inter is not None:
        rate = min(rate, group.local * gpu.inter.bytes_per_second(payload / group.local))
        hops = math.log2(group.local) * gpu.intra.latency_us + math.log2(group.domains) * gpu.inter.latency_us
    return factor * payload / rate + hops * 1e-6


def all_to_all_seconds(gpu: Gpu, group: Group, sent: float) -> float:
    """Every rank sends `sent` bytes, spread evenly over the group: what stays in the domain and what leaves it go at
    once, each over its own link."""
    if group.ranks == 1 or sent == 0 or gpu.intra is None:
        return 0.0
    inside = sent * (group.local - 1) / group.ranks
    outside = sent * (group.ranks - group.local) / group.ranks
    seconds = inside / gpu.intra.bytes_per_second(max(inside, 1.0), "all_to_all")
    latency = gpu.intra.latency_us
    if outside and gpu.inter is not None:
        seconds = max(seconds, outside / gpu.inter.bytes_per_second(outside, "all_to_all"))
        latency = gpu.inter.latency_us
    return seconds + math.log2(group.ranks) * latency * 1e-6


def hop_seconds(gpu: Gpu, payload: float, *, across: bool) -> float:
    """One rank sends `payload` bytes to one other, within the domain or across."""
    link = gpu.inter if across else gpu.intra
    if link is None or payload == 0:
        return 0.0
    return payload / link.bytes_per_second(payload, "hop") + link.latency_us * 1e-6
