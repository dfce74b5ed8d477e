"""The one place that knows the order: build on meta, split, recompute, compile, shard, materialize, replicate."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.model.chunked_loss import compute_in_chunks
from shardwise.model.decoder import Decoder
from shardwise.parallel.compile import compile_blocks
from shardwise.parallel.context import SequenceCut, spread_attention
from shardwise.parallel.data import replicate, shard
from shardwise.parallel.expert import balance_whole_sequences, spread_experts
from shardwise.parallel.materialize import materialize
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.module import ParallelModule
from shardwise.parallel.offload import offload_activations, offload_policy
from shardwise.parallel.precision import compute_dtype, parameter_dtype, reduce_dtype
from shardwise.parallel.recompute import recompute
from shardwise.parallel.tensor import split_tensors
from shardwise.planner.stages import own_stages
from shardwise.spec import Run


def build_parallel(run: Run, mesh: Mesh, device: torch.device) -> ParallelModule:
    """The Run's model on this rank, spread as its layout says, with its initial weights."""
    layout = run.fixed_layout
    cut = SequenceCut(mesh, run.recipe.sequence, device)
    ranges = own_stages(run.model, layout, run.recipe.sequence, mesh.coordinate("pp"))
    stages = {number: _build_stage(run, mesh, layers, cut, device) for number, layers in ranges.items()}
    return ParallelModule(layout, mesh, stages, cut, device, reduce_dtype(run.recipe.precision))


def _build_stage(run: Run, mesh: Mesh, layers: range, cut: SequenceCut, device: torch.device) -> nn.Module:
    layout, precision = run.fixed_layout, run.recipe.precision
    with torch.device("meta"):
        decoder = Decoder(run.model, compute_dtype(precision), layers).to(parameter_dtype(precision))
    if layout.ep > 1:
        spread_experts(decoder, mesh)
    balance_whole_sequences(decoder, mesh, run.recipe.sequence, device)
    if layout.tp > 1:
        split_tensors(decoder, mesh)
    if layout.cp > 1:
        spread_attention(decoder, mesh, layout)
    if layout.cp * layout.tp > 1:
        cut.tell_positions(decoder)
    if layout.loss == "chunked" and decoder.head is not None:
        compute_in_chunks(decoder.head)
    recompute(decoder, layout)
    if layout.compile:
        compile_blocks(decoder, mesh, layout)
    if layout.offload == "activations":
        offload_activations(decoder, layout)
    if layout.zero >= 2:
        shard(decoder, mesh, layout, precision, offload_policy(layout, device))
    home = torch.device("cpu") if layout.offload == "parameters" else device  # of the parameters
    materialize(decoder, run.model, run.recipe.seed, device, home)
    if layout.zero < 2 and layout.tp == layout.pp == layout.ep == 1 and mesh.weights["replicate"].size() > 1:
        return replicate(decoder, mesh, layout, precision)
    return decoder
