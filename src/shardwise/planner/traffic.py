"""What a layout communicates, in seconds: inside a layer, and over the data ranks."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.collectives import all_to_all_seconds, group_of, ring_seconds
from shardwise.planner.parameters import layer_parameters, outer_parameters
from shardwise.planner.subject import Subject


@dataclass(frozen=True)
class DataTraffic:
    """Communication of data parallelism: of one layer in every micro-batch (ZeRO-2 and 3), and once a step."""

    gather_forward: float = 0.0
    gather_backward: float = 0.0
    reduce: float = 0.0
    once: float = 0.0


def data_traffic(subject: Subject) -> DataTraffic:
    layout, gpu, model = subject.layout, subject.cluster.gpu, subject.model
    shards, stride = layout.dp_shard * layout.cp, layout.tp
    one = layer_parameters(model, layout, model.layers - 1)
    whole = one * model.layers / layout.pp + outer_parameters(model, layout)
    if layout.zero >= 2 and shards > 1:
        group = group_of(gpu, shards, stride)
        gather = ring_seconds(gpu, group, one * subject.gather_bytes)
        reduce = ring_seconds(gpu, group, one * subject.gradient_bytes, "reduce_scatter")
        once = 0.0
        if layout.dp_replicate > 1:
            replicas = group_of(gpu, layout.dp_replicate, stride * shards)
            once = ring_seconds(gpu, replicas, whole * subject.gradient_bytes / shards, "all_reduce")
        if layout.zero == 3:
            return DataTraffic(gather, gather, reduce, once)
        once += ring_seconds(gpu, group, whole * subject.gather_bytes)
        return DataTraffic(0.0, 0.0, reduce, once)
    ranks = layout.data_ranks * layout.cp
    if ranks == 1:
        return DataTraffic()
    group = group_of(gpu, ranks, stride)
    if layout.zero == 1:
        gradients = ring_seconds(gpu, group, whole * subject.gradient_bytes, "reduce_scatter")
        return DataTraffic(once=gradients + ring_seconds(gpu, group, whole * subject.gather_bytes))
    return DataTraffic(once=ring_seconds(gpu, group, whole * subject.gradient_bytes, "all_reduce"))


def tensor_seconds(subject: Subject, tokens: float, *, recomputed: bool) -> float:
    """Per layer: forward and backward each gather and scatter the residual stream twice (sequence parallel) or reduce
    it twice; the backward gathers twice more for the weight gradients; a recomputed forward repeats its own."""
    layout, gpu = subject.layout, subject.cluster.gpu
    if layout.tp == 1:
        return 0.0
    payload = subject.activation_bytes * tokens * subject.model.hidden
    group = group_of(gpu, layout.tp, 1)
    if subject.sequence_parallel:
        # Forward 2 gathers and 2 scatters, backward as many and 2 gathers more; repeated, the forward's.
        gather, scatter = ring_seconds(gpu, group, payload), ring_seconds(gpu, group, payload, "reduce_scatter")
        return gather * (6 + 2 * recomputed) + scatter * (4 + 2 * recomputed)
    return ring_seconds(gpu, group, payload, "all_reduce") * (4 + 2 * recomputed)


def context_seconds(subject: Subject, tokens: float) -> float:
    """Keys and values of the whole sequence reach every rank in the forward, and again with their gradients in the
    backward."""
    layout, model, gpu = subject.layout, subject.model, subject.cluster.gpu
    if layout.cp == 1:
        return 0.0
    width = model.latent.kv_rank + model.latent.rope_dim if model.latent else 2 * model.kv_heads * model.head_dim
    payload = subject.activation_bytes * tokens * layout.cp * width / (1 if model.latent else layout.tp)
    group = group_of(gpu, layout.cp, layout.tp)
    return 3 * ring_seconds(gpu, group, payload) + ring_seconds(gpu, group, payload, "reduce_scatter")


def expert_seconds(subject: Subject, tokens: float, recomputed: bool) -> float:
    """Dispatch and combine, forward and backward."""
    layout, model, gpu = subject.layout, subject.model, subject.cluster.gpu
    if layout.ep == 1 or model.experts is None:
        return 0.0
    sent = subject.activation_bytes * tokens / layout.tp * model.experts.top_k * model.hidden
    return all_to_all_seconds(gpu, group_of(gpu, layout.ep, 1), sent) * (4 + 2 * recomputed)
