"""The one place that knows the order: build on meta, shard, materialize, replicate."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.model.decoder import Decoder
from shardwise.parallel.data import replicate, shard
from shardwise.parallel.materialize import materialize
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.precision import compute_dtype, parameter_dtype
from shardwise.spec import Run


def build_parallel(run: Run, mesh: Mesh, device: torch.device) -> nn.Module:
    """The Run's model on this rank, spread as its layout says, with its initial weights."""
    layout, precision = run.fixed_layout, run.recipe.precision
    with torch.device("meta"):
        decoder = Decoder(run.model, compute_dtype(precision)).to(parameter_dtype(precision))
    if layout.zero >= 2:
        shard(decoder, mesh, layout, precision)
    materialize(decoder, run.model, run.recipe.seed, device)
    return replicate(decoder, mesh) if layout.dp_replicate > 1 and layout.zero == 0 else decoder
