"""What our own trainer allocates on one rank of any world, traced on a CPU without memory or communication.

    python tests/memory_trace.py        the planner's closed form against it, a minute or two

Fake process group, fake tensors, and CUDA's operators where the CPU's save other tensors: fused RMSNorm and flash
attention. Bytes are those of living storages, each rounded up to 512 as torch's CUDA allocator does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise.parallel.apply import build_parallel
from shardwise.parallel.mesh import build_mesh
from shardwise.planner.memory import predict_memory
from shardwise.planner.memory.families import WORKSPACE
from shardwise.planner.stacks import STACKS
from shardwise.planner.subject import Subject
from shardwise.spec import Layout, Run
from shardwise.spec.memory import GIB
from shardwise.training.loop import Trainer

ROUND = 512


@dataclass
class Trace:
    """The peak of one step in bytes, where it was, and what was alive then by `phase:operator:size`."""

    peak: int
    at: str
    blocks: Counter[str]
    held: int  # between steps


class Tracker(TorchDispatchMode):
    """Adds up living storages below DTensor, and remembers the largest sum since `restart`."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.paused = "build", False
        self.books: dict[int, tuple[int, str]] = {}  # by id of the storage: bytes, label
        self.live = 0
        self.by_label: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        self.peak, self.at, self.at_peak = 0, "", Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) or kind.__name__ == "AsyncCollectiveTensor" for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            for tensor in tree_iter(out):
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor, func.overloadpacket.__name__)
        return out

    def add(self, tensor: torch.Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.books:
            weakref.finalize(storage, self._forget, id(storage)).atexit = False
            self.resize(storage, operator)

    def resize(self, storage: torch.UntypedStorage, operator: str) -> None:
        key, label = id(storage), f"{self.phase}:{operator}:{_shape(storage)}"
        if key in self.books:
            self._forget(key)
        size = -(-storage.nbytes() // ROUND) * ROUND
        self.books[key] = size, label
        self.live += size
        self.by_label[label] += size
        if self.live > self.peak:
            self.peak, self.at, self.at_peak = self.live, f"{self.phase}:{operator}", Counter(self.by_label)

    def _forget(self, key: int) -> None:
        size, label = self.books.pop(key)
        self.live -= size
        self.by_label[label] -= size

    @contextlib.contextmanager
    def intercepting(self) -> Iterator[None]:
        """FSDP frees and refills storages in place; DTensor propagates shapes through operators that do not run."""
        resize, tracker = torch.UntypedStorage.resize_, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if id(storage) in tracker.books:
                tracker.resize(storage, "resize_")
            return out

        def quiet(method: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                before, tracker.paused = tracker.paused, True
                try:
                    return method(*args, **kwargs)
                finally:
                    tracker.paused = before

            return call

        names = ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached")
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
            for name in names:
                quieted = quiet(getattr(ShardingPropagator, name))
                stack.enter_context(mock.patch.object(ShardingPropagator, name, quieted))
            yield


def _shape(storage: torch.UntypedStorage) -> str:
    return f"{storage.nbytes() / 2**20:.2f}M"


class _FusedNorm(torch.autograd.Function):
    """What `aten::_fused_rms_norm` saves and allocates on CUDA; on a CPU torch decomposes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextlib.contextmanager
def cuda_operators() -> Iterator[None]:
    """The operators that torch picks on CUDA, on CPU tensors."""

    def rms_norm(x, shape, weight=None, eps=None):
        return _FusedNorm.apply(x, weight)

    def attention(q, k, v, is_causal=False, enable_gqa=False, **_):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    with (
        mock.patch.object(F, "rms_norm", rms_norm),
        mock.patch.object(F, "scaled_dot_product_attention", attention),
    ):
        yield


def trace(run: Run, *, rank: int = 0, micro_batches: int = 1) -> Trace:
    """The second step of the Run's own trainer on `rank`; the first one has not all of the optimizer's state.

    Not for DDP, whose reducer reads values in C++. A process group has one life in a process: see `trace_in_child`.
    """
    layout = run.fixed_layout
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    mesh = build_mesh(layout, "cpu")
    with mock.patch("shardwise.parallel.apply.materialize", lambda *_: None):  # FSDP2 cannot be built in the fake mode
        module = build_parallel(run, mesh, torch.device("cpu"))
    tracker = Tracker()
    with cuda_operators(), FakeTensorMode(allow_non_fake_inputs=True), tracker.intercepting(), tracker:
        for stage in module.stages.values():
            stage.to_empty(device="cpu")
        trainer = Trainer(run, module, lambda: False)
        _step(trainer, tracker, micro_batches)
        tracker.phase, held = "inputs", tracker.live
        tracker.restart()
        _step(trainer, tracker, micro_batches)
    return Trace(tracker.peak, tracker.at, +tracker.at_peak, held)


def _step(trainer: Trainer, tracker: Tracker, micro_batches: int) -> None:
    """What `Trainer.steps` does between two batches, without the reading of values, of which there are none."""
    shape = (micro_batches, trainer.run.fixed_layout.micro_batch, trainer.run.recipe.sequence)
    tracker.phase = "pass"
    batch = list(zip(torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long), strict=True))
    trainer._forward_backward(batch, 1)
    tracker.phase = "update"
    trainer.module.gradient_norm()
    trainer._update(2.0, 1e-3)
    trainer.module.drop_gradients()


def trace_in_child(run: Run, *, micro_batches: int = 1) -> Trace:
    """`trace` in a process of its own, forked: torch is imported already."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(trace, run, micro_batches=micro_batches).result()


def example(
    model: str | dict[str, Any], sequence: int, micro_batches: int = 1, layers: int | None = None, **layout: Any
) -> Run:
    """A Run of a preset, cut to `layers`, on the layout."""
    data = {"preset": model} if isinstance(model, str) else dict(model)
    spread = Layout.load(layout)
    batch = sequence * micro_batches * spread.micro_batch * spread.data_ranks
    return Run.load(
        {
            "model": data | ({"layers": layers} if layers else {}),
            "cluster": {"gpu": "h100-sxm", "gpus": spread.world, "gpus_per_node": spread.world},
            "layout": spread,
            "recipe": {"sequence": sequence, "batch_tokens": batch, "steps": 2},
        }
    )


def subject_of(run: Run, micro_batches: int = 1) -> Subject:
    """The same for the planner."""
    return Subject(
        model=run.model,
        layout=run.fixed_layout,
        cluster=run.cluster,
        stack=STACKS["shardwise"],
        sequence=run.recipe.sequence,
        micro_batches=micro_batches,
    )


CASES = [  # (model, sequence, micro-batches a step, layers), layout
    (("gpt2-124m", 1024, 1, None), {"dp_shard": 8, "micro_batch": 8}),
    (("gpt2-124m", 1024, 4, None), {"dp_shard": 8, "micro_batch": 8}),
    (("gpt2-124m", 64, 1, None), {"dp_shard": 8}),
    (("gpt2-124m", 256, 2, None), {"dp_shard": 2, "micro_batch": 2, "zero": 2}),
    (("gpt2-124m", 1024, 2, None), {"micro_batch": 4}),
    (("gpt2-124m", 64, 1, None), {}),
    (("gpt2-124m", 64, 2, None), {}),
    (("llama3.2-1b", 4096, 1, None), {"dp_shard": 8, "micro_batch": 2}),
    (("llama3.2-1b", 512, 2, None), {"dp_shard": 8}),
    (("llama3.2-1b", 2048, 2, None), {"dp_shard": 64, "zero": 2}),
    (("llama3-8b", 4096, 1, 4), {"dp_shard": 64}),
    (("llama3-8b", 8192, 4, 4), {"dp_shard": 64}),
    (("llama3-8b", 512, 1, 4), {"dp_shard": 64}),
    (("llama3-8b", 512, 2, 4), {"dp_shard": 8, "zero": 2}),
    (("llama3-8b", 4096, 1, 4), {"dp_shard": 64, "zero": 2}),
    (("llama3-8b", 4096, 3, 4), {"dp_shard": 64, "zero": 2}),
    (("llama3-8b", 8192, 2, 4), {"dp_replicate": 8, "dp_shard": 8}),
    (("llama3-8b", 256, 2, 4), {"dp_replicate": 8, "dp_shard": 8}),
    (("qwen3-8b", 4096, 1, 3), {"dp_shard": 16}),
    (("qwen3-8b", 256, 2, 3), {"dp_shard": 16}),
    *[
        (case, {**layout, "recompute": policy, "loss": "chunked"})
        for case, layout in [
            (("llama3.2-1b", 4096, 1, 4), {"dp_shard": 8, "micro_batch": 4}),
            (("gpt2-124m", 1024, 1, 9), {"dp_shard": 8, "micro_batch": 8}),
            (("llama3-8b", 8192, 1, 4), {"dp_shard": 8, "tp": 8}),
            (("llama3-8b", 8192, 2, 4), {}),
        ]
        for policy in ("none", "selective", "full", "every:2", "sqrt")
    ],
]


def main() -> None:
    """Prints each case: traced, predicted, and the error."""
    errors = []
    for (model, sequence, micro_batches, layers), layout in CASES:
        run = example(model, sequence, micro_batches, layers, **layout)
        traced = trace_in_child(run, micro_batches=micro_batches)
        memory = predict_memory(subject_of(run, micro_batches))
        live = memory.live - WORKSPACE
        states = memory.parameters + memory.optimizer
        errors.append(abs(live / traced.peak - 1))
        print(
            f"{live / traced.peak - 1:+7.2%}  traced {traced.peak / GIB:8.4f} ({traced.at})  "
            f"predicted {live / GIB:8.4f} ({memory.event})  states {traced.held / GIB:.4f} {states / GIB:.4f}  "
            f"{model} S {sequence} m {micro_batches} L {layers or 'all'} {layout}",
            flush=True,
        )
    print(f"median {statistics.median(errors):.2%}, max {max(errors):.2%}")


if __name__ == "__main__":
    main()
