"""What lies between products and attention, in the very form in which our trainer runs it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.model.experts import MoE
from shardwise.model.layers import Attention
from shardwise.model.loss import cross_entropy_sum, loss_and_gradient
from shardwise.model.rope import rotary_table
from shardwise.profiling.calibration.clock import Clock, backward_of
from shardwise.spec import Model
from shardwise.spec.calibration import MemoryBound

Built = tuple[int, Callable[[], object], Callable[[], object] | None]  # elements, forward, backward

_SIZES = tuple(2**power for power in (16, 20, 22, 24, 26, 28))
_CPU_SIZES = tuple(2**power for power in (10, 13, 16, 19, 22))
_RANKS = 16  # that share a gradient


def measure_memory_bound(clock: Clock, dtype: str, torch_dtype: torch.dtype, *, quick: bool) -> Iterator[MemoryBound]:
    """Every op at every size; on a GPU those of a block once more as torch.compile fuses them."""
    cpu = clock.device.type == "cpu"
    sizes = (_CPU_SIZES if cpu else _SIZES)[:: 2 if quick else 1]
    bench = _Bench(clock.device, torch_dtype, hidden=256 if cpu else 2048)
    for op in _OPS:
        if op == "cast" and torch_dtype == torch.float32:
            continue  # nothing happens
        yield _row(clock, op, dtype, sizes, lambda size, op=op: getattr(bench, op)(size))
    if cpu or quick:
        return
    for op in ("rmsnorm", "layernorm", "rotated_heads", "heads", "swiglu", "gelu"):
        try:
            yield _row(clock, op, dtype, sizes[1::2], lambda size, op=op: bench.compiled(op, size), compiled=True)
        except Exception as error:  # whatever a compiler may raise: without its rows, the eager ones count
            warnings.warn(f"torch.compile: {type(error).__name__}: {error}".splitlines()[0][:200], stacklevel=2)
            return


def _row(
    clock: Clock, op: str, dtype: str, sizes: tuple[int, ...], build: Callable[[int], Built], *, compiled: bool = False
) -> MemoryBound:
    elements, forward_us, backward_us = [], [], []
    for size in sizes:
        count, forward, backward = build(size)
        if elements and count <= elements[-1]:  # whole rows only, and so few
            continue
        elements.append(count)
        forward_us.append(_micro(clock.seconds(forward, keeps=True)))
        if backward is not None:
            backward_us.append(_micro(clock.seconds(backward)))
    given = {"op": op, "dtype": dtype, "compiled": compiled, "elements": elements}
    return MemoryBound.load({**given, "forward_us": forward_us, "backward_us": backward_us})


def _micro(seconds: float) -> float:
    return max(0.001, round(1e6 * seconds, 3))


@torch.library.custom_op("shardwise::no_attention", mutates_args=())
def _no_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that costs nothing: its result is whatever lies in memory. An operator, so that compilers see what a
    real one is to them."""
    return torch.empty_like(q)


@torch.library.custom_op("shardwise::no_attention_backward", mutates_args=())
def _no_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@_no_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@_no_gradients.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_no_attention.register_autograd(
    lambda ctx, gradient: _no_gradients(*ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _skip(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return _no_attention(q, k, v)


class _Same(nn.Module):
    """Experts that cost nothing."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return rows


class _Bench:
    """Builds each op at about a given number of elements."""

    def __init__(self, device: torch.device, dtype: torch.dtype, hidden: int):
        self.device, self.dtype, self.hidden = device, dtype, hidden
        self._compiled: dict[str, Any] = {}

    def rmsnorm(self, size: int) -> Built:
        x, weight = self._rows(size), self._new(self.hidden)
        return self._both(x.numel(), lambda: F.rms_norm(x, weight.shape, weight, 1e-5), [x, weight])

    def layernorm(self, size: int) -> Built:
        x, weight, bias = self._rows(size), self._new(self.hidden), self._new(self.hidden)
        return self._both(x.numel(), lambda: F.layer_norm(x, weight.shape, weight, bias, 1e-5), [x, weight, bias])

    def residual(self, size: int) -> Built:
        x, y = self._rows(size).detach(), self._rows(size).detach()
        return x.numel(), lambda: x + y, lambda: x + y  # backward: two gradients of x

    def heads(self, size: int) -> Built:
        return self._heads(size, 1)

    def rotated_heads(self, size: int) -> Built:
        return self._heads(size, 4)

    def swiglu(self, size: int) -> Built:
        gate, up = self._rows(size), self._rows(size)
        return self._both(gate.numel(), lambda: F.silu(gate) * up, [gate, up])

    def gelu(self, size: int) -> Built:
        x = self._rows(size)
        return self._both(x.numel(), lambda: F.gelu(x, approximate="tanh"), [x])

    def routing(self, size: int) -> Built:
        experts = {"count": 64, "top_k": 8, "ffn": 64}
        model = Model.load({"name": "routing", "layers": 1, "hidden": self.hidden, "heads": 8, "ffn": 64,
                            "vocabulary": 64, "max_sequence": 2**31, "experts": experts})  # fmt: skip
        moe = MoE(model).to(self.device)
        moe.experts = _Same()
        nn.init.normal_(moe.router.weight)
        x = self._new(1, max(8, size // (8 * self.hidden)), self.hidden)
        return self._both(8 * x.numel(), lambda: moe(x), [x])

    def bias(self, size: int) -> Built:
        x = self._rows(size).detach()
        return x.numel(), lambda: x.sum(0), None

    def loss(self, size: int) -> Built:
        logits = self._logits(size)
        labels = torch.randint(logits.shape[-1], logits.shape[:-1], device=self.device)
        return self._both(logits.numel(), lambda: cross_entropy_sum(logits, labels), [logits])

    def chunked_loss(self, size: int) -> Built:
        logits = self._logits(size)[0].detach()
        labels = torch.randint(logits.shape[-1], logits.shape[:-1], device=self.device)
        return logits.numel(), lambda: loss_and_gradient(logits, labels)[1].to(self.dtype), None

    def embedding(self, size: int) -> Built:
        table = torch.randn(4096, self.hidden // 2, device=self.device, requires_grad=True)
        ids = torch.randint(4096, (1, max(1, size // table.shape[1])), device=self.device)
        return self._both(ids.numel() * table.shape[1], lambda: F.embedding(ids, table).to(self.dtype), [table])

    def cast(self, size: int) -> Built:
        weight = torch.randn(size, device=self.device, requires_grad=True)
        return self._both(size, lambda: weight.to(self.dtype), [weight])

    def copy(self, size: int) -> Built:
        source, target = self._new(size).detach(), self._new(size).detach()
        return size, lambda: target.copy_(source), None

    def reduce_input(self, size: int) -> Built:
        """What FSDP2 does with gradients before it reduces them: each in as many pieces as there are ranks, in fp32."""
        parts = [self._new(max(1, size // (4 * self.hidden)), self.hidden).detach() for _ in range(4)]
        rows = sum(-(-len(part) // _RANKS) for part in parts)
        out = torch.empty(_RANKS, rows * self.hidden, device=self.device)
        work = functools.partial(torch._chunk_cat, parts, dim=0, num_chunks=_RANKS, out=out)
        return sum(part.numel() for part in parts), work, None

    def accumulate(self, size: int) -> Built:
        one, other = (torch.randn(size, device=self.device) for _ in range(2))
        return size, lambda: one.add_(other, alpha=1e-6), None

    def clip(self, size: int) -> Built:
        parts = list(torch.randn(size, device=self.device).chunk(16))
        wide = torch.float64 if self.device.type == "cpu" else None

        def work() -> object:
            norms = torch._foreach_norm(parts, dtype=wide)
            torch._foreach_mul_(parts, 0.999)
            return norms

        return size, work, None

    def adamw(self, size: int) -> Built:
        parts = [nn.Parameter(part) for part in torch.randn(size, device=self.device).chunk(16)]
        for part in parts:
            part.grad = torch.randn_like(part)
        optimizer = torch.optim.AdamW(parts, lr=1e-6, fused=True)
        return size, optimizer.step, None

    def compiled(self, op: str, size: int) -> Built:
        """The op as part of a compiled block; a norm with the sum before it."""
        if op.endswith("heads"):
            return self._heads(size, 4 if op.startswith("rotated") else 1, compiled=True)
        x, y = self._rows(size), self._rows(size)
        weight, bias = self._new(self.hidden), self._new(self.hidden)
        functions: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
            "rmsnorm": (_sum_and_rms_norm, [x, y, weight]),
            "layernorm": (_sum_and_layer_norm, [x, y, weight, bias]),
            "swiglu": (_swiglu, [x, y]),
            "gelu": (_gelu, [x]),
        }
        function, given = functions[op]
        fused = self._compile(op, function)
        return self._both(x.numel(), lambda: fused(*given), given)

    def _heads(self, size: int, share: int, *, compiled: bool = False) -> Built:
        """From the fused projection's output to what goes into the output projection, without the attention."""
        head = 64 if share == 1 or self.device.type == "cpu" else 128
        count = max(share, self.hidden // head)
        model = Model.load({"name": "heads", "layers": 1, "hidden": count * head, "heads": count,
                            "kv_heads": count // share, "head_dim": head, "ffn": 64, "vocabulary": 64,
                            "max_sequence": 2**31, "positions": "rope"})  # fmt: skip
        attention = Attention(model)
        width = attention.qkv.out_features
        attention.qkv = attention.out = nn.Identity()
        attention.attend = _skip
        tokens = max(1, size // width)
        batch = max(1, tokens // 4096)
        x = self._new(batch, tokens // batch, width)
        rope = None
        if share > 1:
            rope = rotary_table(model, torch.arange(x.shape[1], device=self.device), x.shape[1], self.dtype)
        split = self._compile(f"heads{share}", attention) if compiled else attention
        return self._both(x.numel(), lambda: split(x, rope), [x])

    def _logits(self, size: int) -> Tensor:
        columns = 32768 if self.device.type != "cpu" else 1024
        return self._new(1, max(1, size // columns), columns)

    def _rows(self, size: int) -> Tensor:
        return self._new(max(1, size // self.hidden), self.hidden)

    def _new(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=True)

    def _compile(self, name: str, function: Callable[..., Any]) -> Any:
        if name not in self._compiled:
            self._compiled[name] = torch.compile(function, dynamic=False)
        return self._compiled[name]

    @staticmethod
    def _both(elements: int, forward: Callable[[], Any], inputs: list[Tensor]) -> Built:
        return elements, forward, backward_of(forward(), inputs)


def _sum_and_rms_norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x + y
    return x, F.rms_norm(x, weight.shape, weight, 1e-5)


def _sum_and_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    x = x + y
    return x, F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_OPS = (
    "rmsnorm", "layernorm", "residual", "heads", "rotated_heads", "swiglu", "gelu", "routing", "bias", "loss",
    "chunked_loss", "embedding", "cast", "copy", "reduce_input", "accumulate", "clip", "adamw",
)  # fmt: skip
