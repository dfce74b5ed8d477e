"""Mixture of experts: a router, experts that each take the tokens that chose them, and experts that all share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.model.grouped import grouped_product
from shardwise.model.layers import Linear, Mlp, cast
from shardwise.model.router import Router, update_balance_bias
from shardwise.spec import Model

__all__ = ["Exchange", "Experts", "MoE", "Pending", "Router", "Stay", "update_balance_bias"]


class Exchange(Protocol):
    """Takes token copies to the ranks of their experts and back. In three parts, so that others can compute while the
    copies are under way."""

    def send(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Any]:
        """rows (N, hidden) sorted by expert, and how many there are of each, (count,) -> rows, perhaps not here yet,
        and the route by which the results go back."""

    def arrived(self, rows: Tensor, route: Any) -> tuple[Tensor, Tensor]:
        """What `send` returned -> the rows for this rank's experts, sorted by these, and how many there are of each."""

    def back(self, rows: Tensor, route: Any) -> Tensor:
        """The experts' results, in the order of `arrived` -> those of this rank's own rows, in the order of `send`."""


class Stay:
    """The exchange of a rank that holds all experts."""

    def send(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return rows, counts

    def arrived(self, rows: Tensor, route: Tensor) -> tuple[Tensor, Tensor]:
        return rows, route

    def back(self, rows: Tensor, route: Tensor) -> Tensor:
        return rows


@dataclass
class Pending:
    """Token copies on their way to the experts. N: copies that were not dropped, of T tokens."""

    rows: Tensor  # copies for this rank's experts
    route: Any  # of the exchange
    weights: Tensor  # (N,) of this rank's own copies, sorted by expert
    order: Tensor  # (N,): which of T · top_k copies each one is
    places: Tensor  # (T · top_k,): the inverse of `order`; N where the copy was dropped
    shape: torch.Size  # (B, S, hidden)


class Experts(nn.Module):
    """Routed experts: each is an MLP (as `Mlp`, without biases) of its own rows of `gate`, `up`, `down`."""

    def __init__(self, model: Model):
        super().__init__()
        spec = model.experts
        assert spec is not None
        up, down = (spec.count, spec.ffn, model.hidden), (spec.count, model.hidden, spec.ffn)
        self.gate = nn.Parameter(torch.empty(up)) if model.activation == "swiglu" else None
        self.up, self.down = nn.Parameter(torch.empty(up)), nn.Parameter(torch.empty(down))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows (N, hidden) sorted by expert, counts (experts,) of each -> (N, hidden)."""
        up = grouped_product(rows, cast(self.up, rows), counts)
        if self.gate is None:
            inner = F.gelu(up, approximate="tanh")
        else:
            inner = F.silu(grouped_product(rows, cast(self.gate, rows), counts)) * up
        return grouped_product(inner, cast(self.down, rows), counts)


class MoE(nn.Module):
    """The MLP of a layer with experts, dropless: those that the router chose, and a shared one, which may have a gate.
    `exchange` takes token copies to the ranks of their experts, whoever these are."""

    def __init__(self, model: Model):
        super().__init__()
        spec = model.experts
        assert spec is not None
        self.count, self.drops = spec.count, spec.capacity_factor is not None
        self.router, self.experts = Router(model), Experts(model)
        self.shared = Mlp(model.model_copy(update={"ffn": spec.shared_ffn})) if spec.shared_ffn else None
        self.shared_gate = Linear(model.hidden, 1, bias=False) if spec.shared_gate else None
        self.exchange: Exchange = Stay()

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, hidden) -> (B, S, hidden)"""
        pending = self.send(x, *self.router(x))
        if self.shared is None:
            return self.receive(pending)
        shared = self.shared(x)  # while the copies are under way
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        return self.receive(pending) + shared

    def send(self, x: Tensor, weights: Tensor, indices: Tensor) -> Pending:
        """Sort the copies of the tokens by expert, and send them; weights and indices (B, S, top_k) from the router."""
        chosen = indices.flatten()
        order = chosen.argsort(stable=True)  # dropped ones, of index `count`, last
        counts = chosen.new_zeros(self.count + 1).scatter_add(0, chosen, torch.ones_like(chosen))[: self.count]
        if self.drops:
            order = order[: int(counts.sum())]
        places = torch.full_like(chosen, len(order)).scatter(0, order, torch.arange(len(order), device=order.device))
        rows, route = self.exchange.send(_TokensToRows.apply(x.flatten(0, 1), order, places), counts)
        return Pending(rows, route, weights.flatten().index_select(0, order), order, places, x.shape)

    def receive(self, pending: Pending) -> Tensor:
        """Compute, take the results back, and add up each token's, in at least fp32 as its weights are: then the sum is
        rounded once, where transformers rounds every term."""
        back = self.exchange.back(self.experts(*self.exchange.arrived(pending.rows, pending.route)), pending.route)
        weighed = _RowsToTokens.apply(back * pending.weights[:, None], pending.order, pending.places)
        return weighed.view(*pending.shape[:2], -1, pending.shape[2]).sum(2).to(back.dtype)


class _TokensToRows(torch.autograd.Function):
    """Tokens (T, hidden) -> their copies, sorted. The gradient is gathered and summed, not scattered: so it is
    deterministic."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = len(places) // max(1, len(tokens))
        return tokens[order // max(1, ctx.copies)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _at(gradient, places).unflatten(0, (-1, ctx.copies)).sum(1), None, None


class _RowsToTokens(torch.autograd.Function):
    """Sorted rows (N, hidden) -> (T · top_k, hidden) by token, zeros for what was dropped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _at(rows, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient[order], None, None


def _at(rows: Tensor, places: Tensor) -> Tensor:
    """rows[places], and zeros for the place after the last."""
    if len(rows) < len(places):
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    return rows[places]
