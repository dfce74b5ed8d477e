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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.model.decoder import Decoder
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.precision import compute_dtype, parameter_dtype, reduce_dtype
from shardwise.spec import Layout, Precision


def shard(decoder: Decoder, mesh: Mesh, layout: Layout, precision: Precision) -> None:
    """FSDP2 (arXiv 2304.11277), in place: one unit per block, one for an untied embedding, one for norm and head.

    Shards parameters, gradients and optimizer state over dp_shard · cp. All-gathers each unit before its forward and, with
    zero 3, again before its backward (zero 2 keeps it in between); reduce-scatters its gradient after its backward,
    then all-reduces it over dp_replicate.
    """
    mixed = compute_dtype(precision) != parameter_dtype(precision)
    dimensions = ("replicate", "shard") if layout.dp_replicate > 1 else "shard"
    options: dict[str, Any] = {
        "mesh": mesh.weights[dimensions],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype(precision) if mixed else None,
            reduce_dtype=reduce_dtype(precision) if mixed else None,
            cast_forward_inputs=False,  # the decoder sets its own types, and rotary tables must stay wide
        ),
    }
    again = layout.zero == 3
    for block in decoder.blocks.values():
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


def replicate(decoder: Decoder, mesh: Mesh) -> DistributedDataParallel:
    """DDP (arXiv 2006.15704): whole replicas; all-reduces gradient buckets while the backward runs.

    The replicas must hold equal weights already; initial weights are keyed by name, so nothing is broadcast.
    """
    device = next(decoder.parameters()).device
    group = mesh.weights.get_group("replicate")
    ddp = DistributedDataParallel(
        decoder,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        init_sync=False,
    )
    ddp.register_comm_hook(group, _sum_bucket)
    return ddp


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


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
