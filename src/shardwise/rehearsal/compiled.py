"""Compiled blocks where there is nothing to compile for: Inductor's own graphs, run on tensors without values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from shardwise.parallel import compile as parallel_compile
from shardwise.parallel.compat import inductor_graphs
from shardwise.rehearsal.kernels import Kernel, Program
from shardwise.rehearsal.nodes import name_of, value_of
from shardwise.rehearsal.tracker import Tracker

_RANDOM_STATE = 16  # bytes, on CUDA


@contextlib.contextmanager
def compiled_without_kernels(tracker: Callable[[], Tracker]) -> Iterator[None]:
    """While the module is built: its blocks are compiled up to the graphs of forward and backward. What is saved for
    the backward is Inductor's choice. tracker(): who is told what the kernels write, once they run."""
    backend = inductor_graphs(lambda graph: as_kernels(graph, tracker))
    with mock.patch.object(parallel_compile, "BACKEND", backend):
        yield


def as_kernels(module: GraphModule, tracker: Callable[[], Tracker]) -> Callable[[list[Any]], list[Any]]:
    """What runs a graph: it takes a list of inputs, which it empties."""
    program = Program(module.graph)

    def run(inputs: list[Any]) -> list[Any]:
        values: dict[Node, Any] = dict(zip(program.inputs, inputs, strict=True))
        inputs.clear()
        for node in program.unread:
            del values[node]
        for kernel in program.kernels:
            tracker().part = kernel.module
            if kernel.fused:
                _write(kernel, values, tracker())
            else:
                _call(kernel.writes[0], values, module)
            for node in kernel.last:
                values.pop(node, None)
        tracker().part = ""
        return [_value(node, values, module) if isinstance(node, Node) else node for node in program.results]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _write(kernel: Kernel, values: dict[Node, Any], tracker: Tracker) -> None:
    for node in kernel.writes:
        sources = [value for source in kernel.reads[node] if isinstance(value := values.get(source), Tensor)]
        over = values.get(kernel.over[node]) if node in kernel.over else None
        values[node] = tracker.write(value_of(node), name_of(node), sources, over)


def _call(node: Node, values: dict[Node, Any], module: GraphModule) -> None:
    arguments, named = map_arg((node.args, node.kwargs), lambda one: _value(one, values, module))
    match name_of(node):  # attention is repeated with the random state that it had, though it drops nothing
        case "run_and_save_rng_state":
            out = torch.empty(_RANDOM_STATE, dtype=torch.uint8), arguments[0](*arguments[1:], **named)
        case "run_with_rng_state":
            out = arguments[1](*arguments[2:], **named)
        case "graphsafe_run_with_rng_state":
            named.pop("rng_state")
            out = arguments[0](*arguments[1:], **named)
        case _:
            out = node.target(*arguments, **named)  # type: ignore[operator]
    _keep(node, out, values)


def _keep(node: Node, out: Any, values: dict[Node, Any]) -> None:
    if isinstance(out, tuple | list):
        for user in node.users:
            _keep(user, out[user.args[1]], values)  # type: ignore[index]
    else:
        values[node] = out


def _value(node: Node, values: dict[Node, Any], module: GraphModule) -> Any:
    if node in values:
        return values[node]
    if node.op == "get_attr":
        return getattr(module, str(node.target))
    source = _value(node.args[0], values, module)  # type: ignore[arg-type]
    if name_of(node) == "wait_tensor":
        return source
    rest = map_arg(node.args[1:], lambda one: _value(one, values, module))
    return node.target(source, *rest, **node.kwargs)  # type: ignore[operator]
