"""Which dimension of a known layout a process group belongs to, whatever it is called."""

from __future__ import annotations

from dataclasses import replace

from shardwise.profiling.trace import Trace, Traffic
from shardwise.spec import Layout


def by_layout(trace: Trace, layout: Layout) -> Trace:
    """The trace with its communication assigned to Timeline streams by the ranks of each group. Ranks are numbered
    (pp, dp_replicate, dp_shard, cp, tp), as in `parallel/mesh.py`. gloo names no groups: where the layout has one
    dimension alone, all is its; else a trace of CPU ranks stays as it is."""
    if layout.world != trace.world:
        return trace
    only = _only_dimension(layout)
    traffics = tuple(
        replace(item, stream=_stream(item, layout) if item.ranks else only or item.stream) for item in trace.traffics
    )
    return replace(trace, traffics=traffics)


def _stream(traffic: Traffic, layout: Layout) -> str:
    size = len(traffic.ranks)
    stride = traffic.ranks[1] - traffic.ranks[0] if size > 1 else 0
    fitting = [
        stream
        for stream, degree, apart in (
            ("tensor", layout.tp, 1),
            ("context", layout.cp, layout.tp),
            ("context", layout.cp * layout.tp if layout.cp > 1 else 1, 1),
            ("pipeline", layout.pp, layout.world // layout.pp),
            ("expert", layout.ep, 1),
        )
        if degree > 1 and (size, stride) == (degree, apart)
    ]
    if traffic.collective == "all_to_all" and "expert" in fitting:
        return "expert"
    data = "all_gather" if traffic.collective == "all_gather" else "reduce_scatter"
    if traffic.collective == "send_recv" and layout.pp > 1 and (not fitting or size == layout.world):
        return "pipeline"
    return fitting[0] if fitting and fitting[0] != "expert" else data


def _only_dimension(layout: Layout) -> str | None:
    """The stream of the one dimension that communicates, if it is not data parallelism (which cp is, too)."""
    if layout.data_ranks * layout.cp > 1 or (layout.tp > 1) == (layout.pp > 1):
        return None
    return "tensor" if layout.tp > 1 else "pipeline"
