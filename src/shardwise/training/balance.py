"""Experts kept equally busy: what the trainer does for it before and after a step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.model.experts import update_balance_bias
from shardwise.parallel.module import ParallelModule
from shardwise.spec import Run


class ExpertBalance:
    """Both ways of balancing (recipe.balance), and how uneven the load was. Nothing where a model has no experts."""

    def __init__(self, module: ParallelModule, run: Run):
        self._settings, self._device = run.recipe.balance, module.device
        self._sequences = run.recipe.batch_sequences if run.model.experts else 0
        self._shape = (run.model.layers, run.model.experts.count if run.model.experts else 0)
        self._routers = {
            int(name): block.mlp.router for name, block in module.named_blocks() if hasattr(block.mlp, "router")
        }

    def before_step(self, loss_scale: float) -> None:
        """The auxiliary loss is a mean over the sequences of the batch, scaled as the loss is."""
        for router in self._routers.values():
            router.auxiliary_scale = self._settings.auxiliary * loss_scale / self._sequences

    def after_step(self, *, updated: bool) -> float | None:
        """Sum the load over all ranks, move the biases unless the update was skipped, and begin to count anew. Returns
        the busiest expert's load over the mean, of the layer where that is highest. Called on every rank."""
        if not self._sequences:
            return None
        loads = torch.zeros(self._shape, dtype=torch.int64, device=self._device)
        for layer, router in self._routers.items():
            loads[layer] = router.load
        dist.all_reduce(loads)
        for layer, router in self._routers.items():
            router.load.copy_(loads[layer])
        if updated and self._settings.bias_rate:
            update_balance_bias(self._routers.values(), self._settings.bias_rate)
        for router in self._routers.values():
            router.load.zero_()
        routed = loads[loads.sum(1) > 0].double()
        return float((routed.amax(1) / routed.mean(1)).max())
