"""Tensor parallelism with sequence parallelism (arXiv 1909.08053, 2205.05198).

What it shards: attention heads, the inner size of every MLP, and the vocabulary, over tp ranks; between those products
activations are split along the sequence, so norms, residuals and their saved tensors are shared out, too. What it
communicates: before each attention and MLP an all-gather along the sequence, after it a reduce-scatter, and the same
the other way round in the backward; of the loss three numbers per token. Norm weights and biases outside the split
products are held by every rank, and their gradients are summed over tp (`cast` in model/layers.py says so).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from shardwise.model.decoder import Decoder
from shardwise.model.experts import MoE, Pending
from shardwise.model.latent import LatentAttention
from shardwise.model.layers import Attention, Linear, Mlp, cast
from shardwise.parallel.collectives import gather, reduce_scatter
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.place import become, place, unplaced
from shardwise.parallel.vocabulary import split_loss

SEQUENCE = 1  # the dimension of activations (B, S, hidden) that is split between products


def split_tensors(decoder: Decoder, mesh: Mesh) -> None:
    """Spread a decoder (or a stage of it, on the meta device) over the mesh's tp ranks, in place."""
    tp = mesh.weights["tp"]
    group, rank = tp.get_group(), tp.get_local_rank()
    if decoder.embedding is not None:
        place(decoder.embedding, tp, weight=Shard(0))
        if decoder.first:
            become(decoder.embedding, _VocabularyEmbedding, group=group, rank=rank)
    if decoder.positions is not None:
        become(decoder.positions, _SlicedPositions, rank=rank, parts=tp.size())
    for block in decoder.blocks.values():
        if isinstance(block.attention, LatentAttention):
            _split_latent_attention(block.attention, tp)
        else:
            _split_attention(block.attention, tp)
        if isinstance(block.mlp, MoE):
            _split_experts(block.mlp, tp, spread=mesh.experts is not None)
        else:
            _split_mlp(block.mlp, tp)
    if decoder.head is not None:
        if decoder.head.weight is not None:
            place(decoder.head, tp, weight=Shard(0))
        decoder.head.register_forward_pre_hook(_gather_input(group))
        split_loss(decoder.head, group)
    for module in decoder.modules():  # all that is left is held by every rank
        place(module, tp, **dict.fromkeys(unplaced(module), Replicate()))


def _split_attention(attention: Attention, tp: DeviceMesh) -> None:
    groups = attention.qkv.out_features // ((attention.queries_per_group + 2) * attention.head_dim)
    if groups % tp.size():
        _split_queries(attention, groups, tp)
    else:
        place(attention.qkv, tp, weight=Shard(0), bias=Shard(0))
    _row(attention.out, tp)
    attention.register_forward_pre_hook(_gather_input(tp.get_group()))


def _split_latent_attention(attention: LatentAttention, tp: DeviceMesh) -> None:
    """Latents are computed for a part of the sequence each, and gathered, which is narrow; heads are split."""
    for linear in (attention.q, attention.q_b, attention.kv_b):
        if linear is not None:
            place(linear, tp, weight=Shard(0))
    if attention.q is not None:
        attention.q.register_forward_pre_hook(_gather_input(tp.get_group()))
    for linear in (attention.q_a, attention.kv_a):
        if linear is not None:
            linear.register_forward_hook(_gather_output(tp.get_group()))
    _row(attention.out, tp)


def _split_experts(moe: MoE, tp: DeviceMesh, *, spread: bool) -> None:
    """Every rank routes its own part of the sequence. Without expert parallelism each then takes all the tokens through
    its part of every expert."""
    if moe.shared is not None:
        _split_mlp(moe.shared, tp)
    if not spread:
        place(moe.experts, tp, gate=Shard(1), up=Shard(1), down=Shard(2))
        become(moe, _SplitMoE, group=tp.get_group())


def _split_queries(attention: Attention, groups: int, tp: DeviceMesh) -> None:
    """Fewer KV heads than ranks: every rank holds all rows of `qkv` and computes those of its queries and of the one
    key and value that they share."""
    ranks_per_group = tp.size() // groups
    own, rest = divmod(attention.queries_per_group, ranks_per_group)
    assert tp.size() % groups == 0 and rest == 0, "spec/legality.py refuses this"
    group, part = divmod(tp.get_local_rank(), ranks_per_group)
    first, d = group * (attention.queries_per_group + 2), attention.head_dim
    queries, shared = first + part * own, first + attention.queries_per_group
    rows = slice(queries * d, (queries + own) * d), slice(shared * d, (shared + 2) * d)
    become(attention.qkv, _SelectedRows, rows=rows)
    attention.queries_per_group = own


def _split_mlp(mlp: Mlp, tp: DeviceMesh) -> None:
    for linear in (mlp.gate, mlp.up):
        if linear is not None:
            place(linear, tp, weight=Shard(0), bias=Shard(0))
    _row(mlp.down, tp)
    mlp.register_forward_pre_hook(_gather_input(tp.get_group()))


def _row(linear: Linear, tp: DeviceMesh) -> None:
    place(linear, tp, weight=Shard(1), bias=Replicate())
    become(linear, _RowLinear, group=tp.get_group())


class _RowLinear(Linear):
    """A part of the inputs each: the products are summed, and every rank keeps its part of the sequence."""

    group: Any

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_scatter(F.linear(x, cast(self.weight, x)), SEQUENCE, self.group)
        return y if self.bias is None else y + cast(self.bias, x)


class _SplitMoE(MoE):
    """A part of the inner size of every expert each."""

    group: Any

    def send(self, x: Tensor, weights: Tensor, indices: Tensor) -> Pending:
        x, weights = gather(x, SEQUENCE, self.group), gather(weights, SEQUENCE, self.group)
        return super().send(x, weights, gather(indices, SEQUENCE, self.group))

    def receive(self, pending: Pending) -> Tensor:
        return reduce_scatter(super().receive(pending), SEQUENCE, self.group)


class _SelectedRows(Linear):
    """All rows are held, those of some slices computed."""

    rows: tuple[slice, ...]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._own(self.weight, x), None if self.bias is None else self._own(self.bias, x))

    def _own(self, weight: Tensor, x: Tensor) -> Tensor:
        whole = cast(weight, x)
        return torch.cat([whole[rows] for rows in self.rows])


class _VocabularyEmbedding(nn.Embedding):
    """A part of the vocabulary each: ids (B, S) -> this rank's part of the sequence, (B, S / tp, hidden)."""

    group: Any
    rank: int

    def forward(self, ids: Tensor) -> Tensor:
        weight = cast(self.weight, self.weight)
        own = ids - self.rank * len(weight)
        other = (own < 0) | (own >= len(weight))
        rows = F.embedding(own.masked_fill(other, 0), weight).masked_fill(other[..., None], 0)
        return reduce_scatter(rows, SEQUENCE, self.group)


class _SlicedPositions(nn.Embedding):
    """Learned positions (S,) -> those of this rank's part of the sequence, (S / tp, hidden)."""

    rank: int
    parts: int

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions.chunk(self.parts)[self.rank], cast(self.weight, self.weight))


def _gather_input(group: Any):
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (gather(arguments[0], SEQUENCE, group), *arguments[1:])

    return hook


def _gather_output(group: Any):
    return lambda module, arguments, output: gather(output, SEQUENCE, group)
