"""Data parallelism: replicas (DDP), shards (FSDP2), and shards that are replicated (HSDP).

Every gradient is *summed* over the data ranks. The one place that divides is the loss, by the global number of target
tokens (`training/loop.py`), so no layout divides twice or not at all.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of its communication hook as objects.

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.model.decoder import Decoder
from shardwise.model.experts import Experts, MoE
from shardwise.parallel.compat import buffers_stay
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.precision import compute_dtype, parameter_dtype, reduce_dtype
from shardwise.spec import Layout, Precision


def shard(decoder: Decoder, mesh: Mesh, layout: Layout, precision: Precision, offload: OffloadPolicy) -> None:
    """FSDP2 (arXiv 2304.11277), in place: one unit per block, one for an untied embedding, one for norm and head.

    Shards parameters, gradients and optimizer state over dp_shard · cp. All-gathers each unit before its forward and,
    with zero 3, again before its backward (zero 2 keeps it in between); reduce-scatters its gradient after its
    backward, then all-reduces it over dp_replicate.
    """
    compute, parameters, reduce = compute_dtype(precision), parameter_dtype(precision), reduce_dtype(precision)
    dimensions = ("replicate", "shard") if layout.dp_replicate > 1 else "shard"
    options: dict[str, Any] = {
        "mesh": mesh.weights[dimensions],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute if compute != parameters else None,
            reduce_dtype=reduce if reduce != compute else None,
            cast_forward_inputs=False,  # the decoder sets its own types, and rotary tables must stay wide
        ),
        "offload_policy": offload,
    }
    again = layout.zero == 3
    for block in decoder.blocks.values():
        if mesh.experts is not None and isinstance(block.mlp, MoE):  # shared by fewer ranks than the rest of the block
            _shard_experts(block.mlp.experts, mesh.experts, {**options, "mesh": mesh.experts[dimensions]}, again)
        fully_shard(block, **options, reshard_after_forward=again)
    if decoder.embedding is not None and not decoder.model.tied:
        fully_shard(decoder.embedding, **options, reshard_after_forward=again)
    if decoder.head is not None and not decoder.model.tied:
        # Needed first thing in the backward, so it is never given up in between.
        fully_shard([decoder.norm, decoder.head], **options, reshard_after_forward=False)
    fully_shard(decoder, **options, reshard_after_forward=False)
    for unit in decoder.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    _prefetch(decoder, layout.prefetch)


def _prefetch(decoder: Decoder, ahead: int) -> None:
    """Gather so many units ahead of the one that computes. FSDP2 by itself gathers one ahead in the backward; in the
    forward it gathers as soon as the host gets there, which runs ahead of the device."""
    if ahead == 1:
        return
    units = [
        module
        for module in (decoder.embedding, *decoder.blocks.values(), decoder.head)
        if isinstance(module, FSDPModule)
    ]
    for index, unit in enumerate(units):
        if ahead:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])
        # An empty list would mean FSDP2's own way; the unit itself is there already.
        unit.set_modules_to_backward_prefetch(units[max(0, index - ahead) : index][::-1] or [unit])


def _shard_experts(experts: Experts, mesh: DeviceMesh, options: dict[str, Any], again: bool) -> None:
    """A unit of their own. Where there are more ranks than experts, the inner size is cut, if it divides."""
    ranks, (count, inner, _) = mesh["shard"].size(), experts.up.to_local().shape
    cut = Shard(1) if count < ranks and inner % ranks == 0 else None
    fully_shard(experts, **options, reshard_after_forward=again, shard_placement_fn=lambda _: cut)


def replicate(decoder: Decoder, mesh: Mesh, layout: Layout, precision: Precision) -> DistributedDataParallel:
    """DDP (arXiv 2006.15704): whole replicas; all-reduces gradients while the backward runs, bucket_mb at a time.

    The replicas must hold equal weights already; initial weights are keyed by name, so nothing is broadcast.
    """
    device = next(decoder.parameters()).device
    group = mesh.weights.get_group("replicate")
    ddp = DistributedDataParallel(
        decoder,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        **buffers_stay(),
        gradient_as_bucket_view=True,
        init_sync=False,
        bucket_cap_mb=layout.bucket_mb,
    )
    ddp.register_comm_hook((group, reduce_dtype(precision)), _sum_bucket)
    return ddp


def _sum_bucket(
    state: tuple[dist.ProcessGroup, torch.dtype], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    (group, dtype), whole = state, bucket.buffer()
    narrow = whole.to(dtype)
    work = dist.all_reduce(narrow, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work.get_future().then(lambda _: whole if narrow is whole else whole.copy_(narrow))


@contextmanager
def micro_step(module: nn.Module, layout: Layout, *, last: bool) -> Iterator[None]:
    """Around one micro-batch's forward and backward: what is reduced now, and what waits for the last one.

    DDP reduces once a step. FSDP2 reduce-scatters every micro-batch, which keeps gradients sharded, and leaves the
    all-reduce of HSDP to the last; with zero 2 parameters stay gathered until then.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(last)
        if layout.zero == 2:
            module.set_reshard_after_backward(last)
    yield
