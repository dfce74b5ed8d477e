"""Offload: what is kept between its uses goes to the CPU.

`parameters`: FSDP2's shards of parameters and gradients live there, and the optimizer updates them there; a unit's
shards are copied to the device before they are gathered. `activations`: what a block's backward needs is copied out in
the forward and back in the backward, with recompute its input alone. `optimizer` is the optimizer's own
(`training/offloaded_optimizer.py`). Host memory is pinned where the device is CUDA.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardwise.model.decoder import Decoder
from shardwise.planner.recompute import recompute_of
from shardwise.spec import Layout

SMALLEST = 2**16  # bytes; what is smaller stays


def offload_policy(layout: Layout, device: torch.device) -> OffloadPolicy:
    """How FSDP2 keeps its shards."""
    if layout.offload == "parameters":
        return CPUOffloadPolicy(pin_memory=device.type == "cuda")
    return OffloadPolicy()


def offload_activations(decoder: Decoder, layout: Layout) -> None:
    """Keep what the blocks of a decoder, or of a stage of it, save for the backward on the CPU, in place."""
    if recompute_of(layout.recompute).kind == "sqrt":  # what is saved are the inputs of segments, not of blocks
        decoder.run_blocks = _keeping_on_host(decoder.run_blocks, None, compiled=layout.compile)
        return
    for block in decoder.blocks.values():
        block.forward = _keeping_on_host(block.forward, block, compiled=layout.compile)


def _keeping_on_host(forward: Any, block: nn.Module | None, *, compiled: bool) -> Any:
    """forward(x, rope, …), with what it saves on the CPU. Not its weights and what is cast from them: those are not one
    micro-batch's; nor the rotary table, which all blocks share. compiled: by code that relies on strides."""

    def run(x: Tensor, rope: tuple[Tensor, Tensor] | None, *others: Any) -> Tensor:
        shared = {tensor.untyped_storage()._cdata for tensor in rope or ()}
        held: dict[Any, _Held] = {}

        def pack(tensor: Tensor) -> Tensor | _Held:
            size = tensor.numel() * tensor.itemsize
            if size < SMALLEST or tensor.untyped_storage()._cdata in shared or _is_weight(tensor, block):
                return tensor
            key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
            if key not in held or not held[key].is_of(tensor):
                held[key] = _Held(tensor, strided=compiled)
            return held[key]

        with saved_tensors_hooks(pack, lambda packed: packed.take() if isinstance(packed, _Held) else packed):
            return forward(x, rope, *others)

    return run


class _Held:
    """A tensor on the CPU, once for all operators that saved it; back on its device while one of them uses it.

    strided: with gaps, too, if it was a view that has some; else close together.
    """

    def __init__(self, tensor: Tensor, *, strided: bool = False):
        self._device, self._version = tensor.device, tensor._version
        self._storage, self._back = weakref.ref(tensor.untyped_storage()), None
        pinned = tensor.is_cuda
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        self._host.copy_(tensor.detach(), non_blocking=pinned)
        self._stride = tensor.stride() if strided else self._host.stride()

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is that tensor, unchanged. (Storages are told apart by address, and an address is used again.)"""
        return self._storage() is tensor.untyped_storage() and self._version == tensor._version

    def take(self) -> Tensor:
        back = self._back() if self._back else None
        if back is None:
            back = self._place()
            back.copy_(self._host, non_blocking=True)
            self._back = weakref.ref(back)
        return back

    def _place(self) -> Tensor:
        return torch.empty_strided(self._host.shape, self._stride, dtype=self._host.dtype, device=self._device)


def _is_weight(tensor: Tensor, block: nn.Module | None) -> bool:
    """Whether it is a parameter of the block, or was made from one and nothing else, as its cast or its transpose."""
    leaf, node = tensor, tensor.grad_fn
    while node is not None:
        leaf = getattr(node, "variable", None)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 else None
    # Asked now, since FSDP2 puts gathered parameters in the place of its shards.
    return block is not None and leaf is not None and any(leaf is parameter for parameter in block.parameters())
