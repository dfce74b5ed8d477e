"""Which module runs: in the forward by hooks, in the backward by marks that the forward left on autograd's graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_MARK = "shardwise module"


class Where:
    """The stack of modules that run. `call` numbers the outermost of them that is not the whole stage: a block, the
    embedding, the head; 0 outside. compiled: the compiler does not see into blocks that call what it does not know."""

    def __init__(self, stages: Iterable[nn.Module], *, compiled: bool = False):
        self._stack: list[tuple[str, bool]] = []
        self._calls, self.call = 0, 0
        for stage in stages:
            for name, module in stage.named_modules():
                inner = name.startswith("blocks.") and name.count(".") > 1
                if name and not isinstance(module, nn.ModuleDict) and not (compiled and inner):
                    unit = name.count(".") == (1 if name.startswith("blocks.") else 0)
                    module.register_forward_pre_hook(self._enter(name, unit))
                    module.register_forward_hook(self._leave(name, unit), always_call=True)

    @property
    def in_forward(self) -> bool:
        """Also in one that a backward does again."""
        return bool(self._stack) or not in_backward()

    @property
    def module(self) -> str:
        if self._stack:
            return self._stack[-1][0]
        node = torch._C._current_autograd_node() if in_backward() else None
        return node.metadata.get(_MARK, "") if node is not None else ""

    def forget(self) -> None:
        """What a recomputation that stopped early has left."""
        self._stack.clear()
        self.call = 0

    def _enter(self, name: str, unit: bool) -> Any:
        def hook(module: nn.Module, arguments: Any) -> None:
            if unit:
                self._stack.clear()  # a recomputation that stopped early has left something
                self._calls += 1
                self.call = self._calls
            self._stack.append((name, unit))

        return hook

    def _leave(self, name: str, unit: bool) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            while self._stack and self._stack.pop()[0] != name:
                pass
            if unit:
                self.call = 0
            if torch.is_grad_enabled():
                _mark([x for x in tree_leaves(output) if isinstance(x, torch.Tensor)], name)

        return hook


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _mark(outputs: list[torch.Tensor], name: str) -> None:
    """Write the name on every node of the graph that no inner module has written on."""
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if _MARK in node.metadata or hasattr(node, "variable"):
            continue
        node.metadata[_MARK] = name
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
