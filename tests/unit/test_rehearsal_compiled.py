"""Compiled blocks in a rehearsal: what is saved, which kernels there are and what they write, and what a step keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from memory_trace import example
from shardwise.model.decoder import Decoder
from shardwise.parallel.compat import inductor_graphs, without_compiled_code
from shardwise.rehearsal.child import in_children
from shardwise.rehearsal.kernels import Program
from shardwise.rehearsal.ledger import part_of
from shardwise.rehearsal.nodes import name_of
from shardwise.rehearsal.rank import on_cpu
from shardwise.rehearsal.trace import trace
from shardwise.spec import Run

MODEL = {"name": "t", "layers": 4, "hidden": 128, "heads": 4, "ffn": 256, "vocabulary": 512, "max_sequence": 256}
LLAMA = MODEL | {"kv_heads": 2}
SEQUENCE = 128


def program(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Program:
    with FakeTensorMode():
        inputs = [torch.empty(shape) for shape in shapes]
        return Program(make_fx(function, tracing_mode="fake")(*inputs).graph)


def launches(found: Program) -> list[list[str]]:
    return [[name_of(node) for node in kernel.writes] for kernel in found.kernels]


def test_elementwise_work_is_done_where_it_is_read() -> None:
    """Only what the last product reads is written, over a result of one of the first two, which nobody reads after."""

    def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return ((x @ gate).sigmoid() * (x @ up)).exp() @ down

    found = program(gated, (8, 4), (4, 16), (4, 16), (16, 4))
    assert launches(found) == [["mm"], ["mm"], ["exp"], ["mm"]]
    (over,) = found.kernels[2].over.values()
    assert name_of(over) == "mm" and len(found.kernels[2].last) == 2


def test_kernels_that_read_the_same_are_one() -> None:
    """And then none of their results can be written over what the other reads, too."""

    def two(x: Tensor, w: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.sin() @ first, y.cos() @ second

    found = program(two, (8, 4), (4, 16), (16, 4), (16, 4))
    assert launches(found) == [["mm"], ["sin", "cos"], ["mm"], ["mm"]]
    assert not found.kernels[1].over


def test_kernels_with_another_between_them_stay_two() -> None:
    def chain(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return (y.sin() @ w) * y

    assert launches(program(chain, (4, 4), (4, 4))) == [["mm"], ["sin"], ["mm"], ["mul"]]


def test_a_norm_is_one_kernel() -> None:
    """Statistics and what is made of them; the sum over rows is another, and with many rows again the same."""

    def norm(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = x * x.pow(2).mean(-1, keepdim=True).rsqrt()
        return y @ w, (x * v).sum(0)

    assert launches(program(norm, (64, 16), (16, 16), (64, 16))) == [["mul"], ["mm"], ["sum"]]

    def centred(x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        return (x - mean) * variance.rsqrt()

    assert launches(program(centred, (64, 16))) == [["mul"]]

    def gradient(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x - (x * v).sum(-1, keepdim=True), (x * v).sum(0)

    assert launches(program(gradient, (8192, 1024), (8192, 1024))) == [["sum", "sub"]]
    assert launches(program(gradient, (64, 16), (64, 16))) == [["sub"], ["sum"]]


def test_views_are_no_kernels() -> None:
    found = program(lambda x, w: (x.view(4, 16).t() @ w).view(-1).neg(), (8, 8), (4, 4))
    assert launches(found) == [["mm"], ["neg"]]


def _kept(run: Run) -> int:
    """Bytes that the blocks' forward left for the backward, by the rehearsal."""
    ledger = trace(run, 0).ledger
    blocks = [block for block in ledger.alive(ledger.peak()) if block.module.startswith("blocks.")]
    return sum(block.size for block in blocks if part_of(block) == "activations" and block.size >= 1024)


def _saved(run: Run) -> int:
    """The same of real blocks, whose graphs PyTorch runs: every storage that is saved and is no weight, once."""
    torch.manual_seed(0)
    decoder = Decoder(run.model, torch.float32, range(run.model.layers))
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def runner(graph: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
        def boxed(inputs: list[Any]) -> Any:
            return Interpreter(graph).boxed_run(inputs)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    x = torch.randn(1, SEQUENCE, run.model.hidden, requires_grad=True)
    angles = torch.randn(SEQUENCE, run.model.head_dim // 2)
    with without_compiled_code(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in decoder.blocks.values():
            x = torch.compile(block.forward, backend=inductor_graphs(runner), fullgraph=True)(x, (angles, angles))
    x.sum().backward()
    for tensor in [*decoder.parameters(), angles]:
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(size for size in saved.values() if size >= 1024)


@pytest.mark.parametrize("extra", [{}, {"qk_norm": True}], ids=["llama", "qk_norm"])
def test_saved_is_what_inductor_saves(extra: dict[str, Any]) -> None:
    """Byte for byte; the last result, which the norm of the head saves, is as large as the first block's input."""
    run = Run.load(
        {
            "model": LLAMA | extra | {"layers": 2},
            "cluster": {"gpu": "cpu", "gpus": 1},
            "layout": {"compile": True},
            "recipe": {"sequence": SEQUENCE, "batch_tokens": SEQUENCE, "precision": "fp32"},
        }
    )
    (kept,), (saved,) = (list(in_children(function, [(run,)])) for function in (_kept, _saved))
    assert kept == saved > 0


def test_a_compiled_step() -> None:
    """It keeps less than an eager one, does the same work, and everything has its part and its place."""
    layouts: list[dict[str, Any]] = [
        {"dp_shard": 2},
        {"dp_shard": 2, "compile": True},
        {"dp_shard": 2, "compile": True, "recompute": "full"},
        {"dp_shard": 2, "tp": 2, "compile": True, "loss": "chunked"},
    ]
    runs = [example(LLAMA, 256, 2, 4, **layout) for layout in layouts]
    eager, none, full, tensor = in_children(on_cpu, [(run, 0, 2, 1.0, None) for run in runs])
    kept = [found["parts"]["activations"] for found in (eager, none, full)]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3
    for part in ("parameters", "optimizer", "gradients", "gathered", "logits"):
        assert none["parts"][part] == eager["parts"][part]
    assert none["flops"] == eager["flops"]
    assert full["flops"]["mm"] > none["flops"]["mm"]
    assert min(tensor["parts"].values()) >= 0 and tensor["flops"]["mm"] < none["flops"]["mm"]
    assert any(".mlp" in module for _, _, module, _ in none["largest"])
    assert any("layout.compile" in line for line in none["modelled"])
