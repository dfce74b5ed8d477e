"""What a node of a compiled graph is to Inductor: a view, work that can be fused, or a kernel of its own."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

_FUSED = {
    "arange", "cat", "constant_pad_nd", "copy", "embedding", "empty", "full", "full_like", "gather", "index",
    "index_select", "iota", "ones_like", "scalar_tensor", "select_scatter", "slice_scatter", "zeros_like",
}  # fmt: skip
_VIEWS = {"_unsafe_view", "wait_tensor"}  # beside those that say so

_SELF = "L['self']"


def name_of(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet))


def is_item(node: Node) -> bool:
    """One of the results of another node."""
    return node.target is operator.getitem


def is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if is_item(node):
        return is_view(node.args[0])  # type: ignore[arg-type]
    return getattr(node.target, "is_view", False) or name_of(node) in _VIEWS


def is_reduction(node: Node) -> bool:
    if is_item(node):
        return is_reduction(node.args[0])  # type: ignore[arg-type]
    return node.op == "call_function" and torch.Tag.reduction in getattr(node.target, "tags", ())


def is_fusable(node: Node) -> bool:
    """Elementwise, a reduction, or a rearrangement."""
    if node.op != "call_function":
        return False
    if is_item(node):
        return is_fusable(node.args[0])  # type: ignore[arg-type]
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags or name_of(node) in _FUSED


def is_kernel(node: Node) -> bool:
    """A product, attention, a collective: what Inductor calls as it is."""
    return node.op == "call_function" and not (is_fusable(node) or is_view(node) or is_item(node))


def value_of(node: Node) -> Any:
    """Without values: what says its shape and type."""
    return node.meta.get("val")


def module_of(node: Node) -> str:
    """Where in the compiled module it comes from, or its forward: `.mlp.gate`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    return path.removeprefix(_SELF) if path.startswith(_SELF) else ""


def bytes_of(node: Node) -> int:
    """Of its storage; 0 where it has none."""
    value = value_of(node)
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


def numel_of(node: Node) -> int:
    value = value_of(node)
    return value.numel() if isinstance(value, Tensor) else 0
