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

_MADE_OF = {
    "_to_copy", "convert_element_type", "mul", "add", "t", "clone", "neg", "div", "cat", "stack", "sum", "empty_like",
    "zeros_like",
}  # fmt: skip
_PRODUCTS = ("mm", "bmm", "addmm", "_grouped_mm")
_WEIGHTS = ("parameters", "gathered", "gradients")


class Tracker(TorchDispatchMode):
    """Keeps a Ledger. `phase` is what the step does: build, pass, update."""

    def __init__(self, where: Where, vocabulary: int, *, shards_on_host: bool = False, device: str = "cpu"):
        super().__init__()
        self._device = device
        self._shards_on_host = shards_on_host
        self.ledger, self.phase = Ledger(), "build"
        self.part = ""  # of a compiled block: what Where does not see
        self.flops: Counter[str] = Counter()
        self._where, self._vocabulary = where, vocabulary
        self._paused = 0
        self._kind, self._stream, self._reducing = "", "", False
        self._numbers: dict[int, int] = {}  # of blocks, by id of their storage
        self._owners: dict[int, int] = {}  # storages of a block, where these are several

    supports_higher_order_operators = True  # which the compiler meets; they are others' business

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile works inside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) or kind.__name__ == "AsyncCollectiveTensor" for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not self._paused and isinstance(func, torch._ops.OpOverload):
            name = func.overloadpacket.__name__
            if name == "wait_tensor":  # gives back what it waits for; a fake one is made anew
                self._share(args[0], out)
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self._see(tensor, name, args)
            if work := flops_of(func, args, kwargs or {}, out):
                self.flops[name] += work
        return out

    def write(
        self, like: torch.Tensor, operator: str, sources: list[torch.Tensor], over: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A tensor like this one, as what a fused kernel that ends with `operator` makes of its sources; in the memory
        of `over`, which ends with it, if that is as large."""
        weights = all(self.kind_of(source) in _WEIGHTS for source in sources)
        with self._pause(), self.labelling("gathered" if weights and sources else "", self._stream):
            if over is not None and over.untyped_storage().nbytes() == like.untyped_storage().nbytes():
                storage = over.untyped_storage()
                self._forget(id(storage))
                self._enter(storage, operator, self._kind, self._stream)
                flat = over.as_strided((storage.nbytes() // over.itemsize,), (1,), 0)
                return flat.view(like.dtype).as_strided(like.shape, like.stride(), 0)
            out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            self._see(out, operator, ())
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
        if action == "reduce":  # the first buffer is its input, the next the shards; what else is made are copies
            made = range(first, len(self.ledger.blocks))
            buffers = [number for number in made if self.ledger.blocks[number].operator in ("empty", "_to_copy")]
            for number in buffers[1:]:
                self.ledger.blocks[number].kind = "gradients"
                if self._shards_on_host:
                    self.ledger.to_host(number)

    def _see(self, tensor: torch.Tensor, operator: str, args: Any) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._numbers or tensor.device.type == "meta":
            return
        weakref.finalize(storage, self._forget, id(storage)).atexit = False
        elsewhere = tensor.device.type != self._device
        kind = "host" if elsewhere else self._kind or self._guess(tensor, operator, args)
        self._enter(storage, operator, kind, self._stream)

    def _enter(self, storage: torch.UntypedStorage, operator: str, kind: str, stream: str) -> None:
        where = self._where
        self._numbers[id(storage)] = self.ledger.allocate(
            Block(
                size=-(-storage.nbytes() // ROUND) * ROUND,
                kind=kind,
                operator=operator,
                module=(where.module or self.phase) + self.part,
                begin=0,
                forward=self.phase == "pass" and where.in_forward,
                call=where.call,
                backward=in_backward(),
                # FSDP2 fills the reduction's input on the stream that computes.
                stream="" if stream == "reduce" and self._first_of_reduction() else stream,
            )
        )

    def _share(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Both are the same memory, which is there as long as one of them."""
        first, second = id(old.untyped_storage()), id(new.untyped_storage())
        if first != second and (number := self._numbers.get(first)) is not None:
            weakref.finalize(new.untyped_storage(), self._forget, second).atexit = False
            self._numbers[second] = number
            self._owners[number] = self._owners.get(number, 1) + 1

    def _first_of_reduction(self) -> bool:
        first, self._reducing = not self._reducing, True
        return first

    def _forget(self, key: int) -> None:
        number = self._numbers.pop(key)
        if (owners := self._owners.pop(number, 1)) > 1:
            self._owners[number] = owners - 1
        else:
            self.ledger.free(number, self._where.call, backward=in_backward())

    def _guess(self, tensor: torch.Tensor, operator: str, args: Any) -> str:
        """What a new tensor of a forward or backward is, by what it was made of. "" leaves it to its life."""
        if self.phase != "pass":
            return ""
        inputs = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        kinds = [self.kind_of(x) for x in inputs]
        size = tensor.numel()
        if operator in _MADE_OF and any(
            kind in _WEIGHTS and (x.numel() == size or operator == "cat") for x, kind in zip(inputs, kinds, strict=True)
        ):
            return "gathered"
        head, product = self._where.module.startswith("head"), operator in _PRODUCTS
        if head and not product and "logits" in kinds and operator != "embedding_dense_backward":
            return "logits"
        if head and product and not in_backward() and "logits" not in kinds and tensor.shape[-1] == self._vocabulary:
            return "logits"
        # A product with neither operand a weight is the gradient of one. The loss in pieces has it in its forward.
        if (in_backward() and not self._where.in_forward) or (head and "logits" in kinds):
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
