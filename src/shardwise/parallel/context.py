"""Context parallelism: every sequence is spread over cp ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.decoder import Decoder
from shardwise.parallel.mesh import Mesh
from shardwise.spec import Layout


def own_positions(length: int, parts: int, rank: int) -> Tensor:
    """Which positions of a sequence a rank has: of 2 · parts pieces the rank-th from the start and from the end, so
    that causal attention is the same work for all. (length / parts,) int64, ascending."""
    pieces = torch.arange(length).chunk(2 * parts)
    return torch.cat([pieces[rank], pieces[2 * parts - 1 - rank]])


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
    """Make every attention of the decoder see the keys and values of the other ranks."""
    raise NotImplementedError
