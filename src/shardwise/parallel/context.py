"""Context parallelism: every sequence is spread over cp ranks, an early and a late piece of it on each.

What it shards: all activations, along the sequence. What it communicates: only attention sees other positions than its
own, and there is one file for each way in which it can: `gathered.py` (all keys and values are gathered), `ring.py`
(they travel around), `ulysses.py` (each rank gets whole sequences of some heads). Weights are replicated, or sharded
over dp_shard · cp, and their gradients are summed over cp as over data ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.decoder import Decoder
from shardwise.parallel.gathered import gathered_attention
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pieces import own_positions
from shardwise.parallel.ring import ring_attention
from shardwise.parallel.ulysses import ulysses_attention
from shardwise.spec import Layout

_METHODS = {"allgather": gathered_attention, "ring": ring_attention, "ulysses": ulysses_attention}


class SequenceCut:
    """This rank's part of sequences of one length."""

    def __init__(self, mesh: Mesh, length: int, device: torch.device):
        self._parts, self.length = mesh.layout.cp, length
        self._positions = own_positions(length, self._parts, mesh.coordinate("cp")).to(device)

    def __call__(self, tensor: Tensor) -> Tensor:
        """(B, S) -> (B, S / cp)"""
        return tensor if self._parts == 1 else tensor[:, self._positions]

    def tell_positions(self, decoder: Decoder) -> None:
        """Give the decoder the positions of its part at each call."""

        def hook(module: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return arguments, {**named, "positions": self._positions, "length": self.length}

        decoder.register_forward_pre_hook(hook, with_kwargs=True)


def spread_attention(decoder: Decoder, mesh: Mesh, layout: Layout) -> None:
    """Make every attention of the decoder see the keys and values of the other ranks of cp, in place."""
    for block in decoder.blocks.values():
        block.attention.attend = partial(_METHODS[layout.cp_method], group=mesh.context)
