"""The tracker: watches storages come and go below DTensor and FSDP2, on fake tensors or real ones."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.parallel import compat
from shardwise.rehearsal.flops import flops_of
from shardwise.rehearsal.ledger import ROUND, Block, Ledger
from shardwise.rehearsal.where import Where, in_backward

_MADE_OF = {"_to_copy", "mul", "add", "t", "clone", "neg", "div", "cat", "stack", "sum", "empty_like"}
_WEIGHTS = ("parameters", "gathered", "gradients")


class Tracker(TorchDispatchMode):
    """Keeps a Ledger. `phase` is what the step does: build, pass, update."""

    def __init__(self, where: Where, vocabulary: int, *, shards_on_host: bool = False):
        super().__init__()
        self._shards_on_host = shards_on_host
        self.ledger, self.phase = Ledger(), "build"
        self.flops: Counter[str] = Counter()
        self._where, self._vocabulary = where, vocabulary
        self._paused = 0
        self._kind, self._stream, self._reducing = "", "", False
        self._numbers: dict[int, int] = {}  # of blocks, by id of their storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) or kind.__name__ == "AsyncCollectiveTensor" for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            name = func.overloadpacket.__name__
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self._see(tensor, name, args)
            if work := flops_of(func, args, kwargs or {}, out):
                self.flops[name] += work
        return out

    def adopt(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """What was there before."""
        for tensor in tensors:
            with self.labelling(kind):
                self._see(local(tensor), "", ())

    def relabel(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Say what these are, whenever they were allocated."""
        for tensor in tensors:
            number = self._numbers.get(id(local(tensor).untyped_storage()))
            if number is not None and self.ledger.blocks[number].kind != "host":
                self.ledger.blocks[number].kind = kind

    @contextlib.contextmanager
    def labelling(self, kind: str, stream: str = "") -> Iterator[None]:
        """What is allocated inside is of this kind."""
        before = self._kind, self._stream
        self._kind, self._stream, self._reducing = kind, stream, False
        try:
            yield
        finally:
            self._kind, self._stream = before

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around all that is tracked. FSDP frees and refills storages in place; DTensor propagates shapes through
        operators that do not run."""
        resize, tracker = torch.UntypedStorage.resize_, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if id(storage) in tracker._numbers:
                block = tracker.ledger.blocks[tracker._numbers[id(storage)]]
                tracker._forget(id(storage))
                tracker._enter(storage, "resize_", block.kind or tracker._kind, tracker._stream)
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        try:
            with compat.around_shape_propagation(self._pause), compat.around_fsdp(self._fsdp), self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextlib.contextmanager
    def _fsdp(self, action: str, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """action: "gather", "reduce", or "accumulate" with the unsharded gradients that now wait."""
        if action == "accumulate":
            yield
            self.relabel(tensors, "gradients")
            return
        first = len(self.ledger.blocks)
        with self.labelling("gathered", action if action != "unshard" else ""):
            yield
        if action == "reduce" and self._shards_on_host:  # of what was made, the first is the input, the next the shards
            for number in range(first + 1, len(self.ledger.blocks)):
                self.ledger.to_host(number)

    def _see(self, tensor: torch.Tensor, operator: str, args: Any) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._numbers or tensor.device.type == "meta":
            return
        weakref.finalize(storage, self._forget, id(storage)).atexit = False
        self._enter(storage, operator, self._kind or self._guess(tensor, operator, args), self._stream)

    def _enter(self, storage: torch.UntypedStorage, operator: str, kind: str, stream: str) -> None:
        where = self._where
        self._numbers[id(storage)] = self.ledger.allocate(
            Block(
                size=-(-storage.nbytes() // ROUND) * ROUND,
                kind=kind,
                operator=operator,
                module=where.module or self.phase,
                begin=0,
                forward=self.phase == "pass" and where.in_forward,
                call=where.call,
                # FSDP2 fills the reduction's input on the stream that computes.
                stream="" if stream == "reduce" and self._first_of_reduction() else stream,
            )
        )

    def _first_of_reduction(self) -> bool:
        first, self._reducing = not self._reducing, True
        return first

    def _forget(self, key: int) -> None:
        self.ledger.free(self._numbers.pop(key), self._where.call)

    def _guess(self, tensor: torch.Tensor, operator: str, args: Any) -> str:
        """What a new tensor of a forward or backward is, by what it was made of. "" leaves it to its life."""
        if self.phase != "pass":
            return ""
        inputs = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        kinds = [self.kind_of(x) for x in inputs]
        size = tensor.numel()
        if operator in _MADE_OF and any(
            kind in _WEIGHTS and x.numel() == size for x, kind in zip(inputs, kinds, strict=True)
        ):
            return "gathered"
        head = self._where.module.startswith("head")
        if head and tensor.ndim and tensor.shape[-1] == self._vocabulary and tensor.dtype.is_floating_point:
            if not (in_backward() and operator in ("mm", "bmm") and not any(kind == "logits" for kind in kinds)):
                return "logits"
        elif head and "logits" in kinds and operator not in ("mm", "bmm", "addmm", "embedding_dense_backward"):
            return "logits"
        # A product with neither operand a weight is the gradient of one.
        if in_backward() and not self._where.in_forward:
            if operator == "embedding_dense_backward":
                return "gathered"
            if operator in ("mm", "_grouped_mm") and not any(kind in _WEIGHTS for kind in kinds):
                return "gathered"
        return ""

    def kind_of(self, tensor: torch.Tensor) -> str:
        number = self._numbers.get(id(tensor.untyped_storage()))
        return self.ledger.blocks[number].kind if number is not None else ""


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
