"""DDP without its reducer, which is C++ and reads values: the same buckets, and gradients that move into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.mesh import Mesh
from shardwise.parallel.precision import reduce_dtype
from shardwise.spec import Layout, Precision


class Replica(DistributedDataParallel):
    """Allocates buckets of `bucket_mb` (the first of 1 MiB) at its first forward, in the reverse order of the
    parameters. A gradient is copied into its bucket as soon as it is there, and from then on is a view of it; without
    synchronisation (`no_sync`) it stays where autograd put it."""

    def __init__(self, decoder: nn.Module, mesh: Mesh, layout: Layout, precision: Precision):
        nn.Module.__init__(self)  # not DDP's own
        self.module = decoder
        self.require_backward_grad_sync = True
        self._limit, self._reduce = layout.bucket_mb * 2**20, reduce_dtype(precision)
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        self._left: dict[nn.Parameter, list[int]] = {}

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if not self._views:
            self._make_buckets()
        for counter in self._left.values():
            counter[0] = counter[1]
        return self.module(*arguments, **named)

    def _make_buckets(self) -> None:
        own = [parameter for parameter in self.module.parameters() if parameter.requires_grad][::-1]
        limit, bucket, size = 2**20, list[nn.Parameter](), 0
        for parameter in own:
            bucket.append(parameter)
            size += parameter.numel() * parameter.itemsize
            if size >= limit or parameter is own[-1]:
                self._allocate(bucket)
                limit, bucket, size = self._limit, [], 0

    def _allocate(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.empty(sum(parameter.numel() for parameter in bucket), dtype=bucket[0].dtype)
        counter = [len(bucket), len(bucket)]
        views = flat.split([parameter.numel() for parameter in bucket])
        for parameter, view in zip(bucket, views, strict=True):
            self._views[parameter], self._left[parameter] = view.view_as(parameter), counter
            parameter.register_post_accumulate_grad_hook(self._ready)

    @torch.no_grad()
    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.require_backward_grad_sync:
            return
        view = self._views[parameter]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        counter = self._left[parameter]
        counter[0] -= 1
        if counter[0] == 0 and view.dtype != self._reduce:
            view._base.to(self._reduce)  # what the hook sends
