"""An optimizer whose state lives on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.parallel.buckets import in_buckets
from shardwise.parallel.compat import with_local
from shardwise.parallel.gradients import local

BUCKET = 32 * 2**20  # elements whose state is on the device at once, unless one parameter has more


class OffloadedOptimizer:
    """Around an optimizer: the parameters are updated a bucket at a time, whose state visits the device. The same
    kernels, so the same bits. Host memory is pinned where the parameters are on CUDA."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer, self.state, self.param_groups = optimizer, optimizer.state, optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        try:
            for group in self.param_groups:
                for bucket in in_buckets(group["params"], lambda parameter: local(parameter).numel(), BUCKET):
                    self._update(group, bucket)
        finally:
            self._optimizer.param_groups = self.param_groups
        if any(parameter.is_cuda for group in self.param_groups for parameter in group["params"]):
            torch.cuda.current_stream().synchronize()  # whoever reads the state next reads it on the host

    def _update(self, group: dict[str, Any], bucket: list[nn.Parameter]) -> None:
        hosts = {parameter: dict(self.state[parameter]) for parameter in bucket if parameter in self.state}
        for parameter, state in hosts.items():
            self.state[parameter].update({key: _moved(value, parameter.device) for key, value in state.items()})
        self._optimizer.param_groups = [{**group, "params": bucket}]
        self._optimizer.step()
        for parameter in bucket:
            for key, value in self.state[parameter].items():
                host = hosts.get(parameter, {}).get(key)
                if isinstance(host, Tensor) and host is not value:
                    local(host).copy_(local(value), non_blocking=True)
                    self.state[parameter][key] = host
                else:
                    self.state[parameter][key] = _moved(value, torch.device("cpu"))


def _moved(value: Any, device: torch.device) -> Any:
    """On the device; what is no tensor, or a single number such as `step`, is left where it is."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.device == device:
        return value
    own = local(value)
    moved = torch.empty_like(own, device=device, pin_memory=own.is_cuda).copy_(own, non_blocking=True)
    return with_local(value, moved) if isinstance(value, DTensor) else moved
