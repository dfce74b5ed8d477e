"""Which experts a token goes through, and how experts are kept equally busy.

Both ways of balancing, and dropping, look at one sequence at a time or at the whole batch, never at what happens to lie
on one rank: so they do the same on every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.model.layers import cast
from shardwise.spec import Model
from shardwise.spec.experts import Experts as ExpertsSpec

SequenceMap = Callable[[Tensor], Tensor]


class Router(nn.Module):
    """Scores of all experts for each token, and the best `top_k` of them, in at least fp32.

    Buffers: `balance_bias` (count,), part of the weights, is added to the scores for the choice only (DeepSeek-V3,
    arXiv 2412.19437, equation 16); `load` (count,) int64 counts the choices of training since it was last set to 0.

    For whoever spreads a sequence over ranks: `sum_over_sequence` makes counts (B, count) of the part those of the
    whole; `whole_sequence` makes indices (B, S, top_k) of the part those of the whole in order of position, and
    `own_part` is its inverse; `sequence_parts` says into how many equal parts sequences are cut. The trainer sets
    `auxiliary_scale`, the factor of the balance loss of one sequence.
    """

    balance_bias: Tensor | None
    load: Tensor

    def __init__(self, model: Model):
        super().__init__()
        assert model.experts is not None
        self.spec: ExpertsSpec = model.experts
        self.weight = nn.Parameter(torch.empty(self.spec.count, model.hidden))
        self.register_buffer("balance_bias", torch.zeros(self.spec.count) if self.spec.router_bias else None)
        self.register_buffer("load", torch.zeros(self.spec.count, dtype=torch.int64), persistent=False)
        self.auxiliary_scale = 0.0
        self.sequence_parts = 1
        self.sum_over_sequence: SequenceMap = _same
        self.whole_sequence: SequenceMap = _same
        self.own_part: SequenceMap = _same

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, S, hidden) -> weights (B, S, top_k) in promote_types(x.dtype, float32), indices (B, S, top_k) int64.

        A choice that was dropped has weight 0 and index `count`.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        # Through the type of x first: FSDP2 gathers the weight in that type.
        logits = F.linear(x.to(wide), cast(self.weight, x).to(wide))
        scores = logits.sigmoid() if self.spec.router == "sigmoid" else logits.softmax(-1)
        indices = self._choose(scores.detach())
        weights = scores.gather(-1, indices)
        if self.spec.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        weights = weights * self.spec.scale
        if self.training:
            count_load(self.load, indices)
            if self.auxiliary_scale:
                weights = _WithGradientOf.apply(weights, self.auxiliary_scale * self._imbalance(scores, indices))
            if self.spec.capacity_factor:
                dropped = ~self._fits(indices)
                weights, indices = weights.masked_fill(dropped, 0), indices.masked_fill(dropped, self.spec.count)
        return weights, indices

    def _choose(self, scores: Tensor) -> Tensor:
        """(B, S, count) -> (B, S, top_k), among the experts of the best groups."""
        spec = self.spec
        if self.balance_bias is not None:
            scores = scores + self.balance_bias
        if spec.top_groups < spec.groups:
            grouped = scores.unflatten(-1, (spec.groups, -1))  # (B, S, groups, count / groups)
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            chosen = best.topk(spec.top_groups, dim=-1).indices
            closed = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
            scores = grouped.masked_fill(closed[..., None], -math.inf).flatten(-2)
        return scores.topk(spec.top_k, dim=-1).indices

    def _imbalance(self, scores: Tensor, indices: Tensor) -> Tensor:
        """Σ f P over experts and sequences, of this rank's tokens (DeepSeek-V3, equations 17-20): f is the share of
        choices that an expert got, times count; P the mean of its scores. 1 for each balanced sequence."""
        spec = self.spec
        length = indices.shape[1] * self.sequence_parts
        counts = self.sum_over_sequence(_counts(indices.flatten(1), spec.count))  # (B, count)
        frequencies = counts.to(scores.dtype) * (spec.count / (spec.top_k * length))
        shares = scores / (scores.sum(-1, keepdim=True) + 1e-20) if spec.router == "sigmoid" else scores
        return (frequencies * shares.sum(1)).sum() / length

    def _fits(self, indices: Tensor) -> Tensor:
        """(B, S, top_k) -> which choices come before the expert has taken all that it may of their sequence."""
        whole, spec = self.whole_sequence(indices), self.spec
        capacity = math.ceil((spec.capacity_factor or 0) * whole.shape[1] * spec.top_k / spec.count)
        chosen = whole.new_zeros(*whole.shape[:2], spec.count, dtype=torch.int32).scatter(-1, whole, 1)
        place = chosen.cumsum(1, dtype=torch.int32).gather(-1, whole)  # a token's place in its expert's queue, from 1
        return self.own_part(place <= capacity)


@torch.no_grad()
def update_balance_bias(routers: Iterable[Router], rate: float) -> None:
    """After a step: experts that got less than the mean become likelier by `rate`, others less likely (arXiv
    2408.15664, algorithm 1). `load` must be that of the whole batch, summed over ranks; it is left as it is."""
    for router in routers:
        if router.balance_bias is not None:
            load = router.load.double()
            router.balance_bias += (rate * (load.mean() - load).sign()).to(router.balance_bias.dtype)


def _recomputing() -> bool:
    """Whether this forward is done again within a backward. torch.utils.checkpoint asks the same."""
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("shardwise::count_load", mutates_args={"load"})
def count_load(load: Tensor, indices: Tensor) -> None:
    """Add to load (count,) how often each expert stands in `indices`, unless this forward is a recomputation.

    An operator, so that a compiled block asks that at each run, not when it is traced.
    """
    if not _recomputing():
        load += _counts(indices.flatten(), len(load))


@count_load.register_fake
def _(load: Tensor, indices: Tensor) -> None:
    return None


def _counts(indices: Tensor, count: int) -> Tensor:
    """(…, N) -> how often each of `count` experts stands there, (…, count) int64. bincount would wait for it."""
    zeros = indices.new_zeros(*indices.shape[:-1], count)
    return zeros.scatter_add(-1, indices, torch.ones_like(indices))


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _WithGradientOf(torch.autograd.Function):
    """The first argument, as if the second, a scalar, were added to the loss: so nothing has to be carried there."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, term: Tensor) -> Tensor:
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())
