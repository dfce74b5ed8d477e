"""A compiled graph as the kernels that Inductor makes of it (torch/_inductor/scheduler.py, which this models).

Elementwise work is done where its result is read. Written to memory is what the graph returns, what a kernel that
cannot be fused reads, what a reduction yields, and what would be too much to do twice. Kernels that read the same, over
the same range, are fused, unless one must wait for what the other leads to. What only its own kernel reads is then not
written after all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from shardwise.rehearsal.nodes import (
    bytes_of,
    is_fusable,
    is_item,
    is_kernel,
    is_reduction,
    is_view,
    module_of,
    name_of,
    numel_of,
    value_of,
)

_READS_TWICE, _READS = 4, 8  # how many reads may be repeated for each of several readers, and done for one
_MIXED_SIZE, _MIXED_ROWS, _MIXED_COLUMNS = 5 * 2**20, 4096, 16384  # where sums over rows and columns are fused
_TOO_FAR = 64  # kernels between two that could be fused


@dataclass(eq=False)
class Kernel:
    """One launch. writes: results of fused work, or the one operator that is a kernel of its own. reads: values in
    memory, by who reads them. range: (rows, columns) of a reduction, of which columns are summed, or rows (by_columns);
    (elements, 1) of other work. last: values that nobody reads later; over: which of these a result is written over."""

    writes: list[Node]
    reads: dict[Node, set[Node]]
    fused: bool
    range: tuple[int, int]
    module: str
    begin: int  # its place, and that of its last part, before anything was fused
    end: int
    reduces: bool = False
    by_columns: bool = False
    last: list[Node] = field(default_factory=list)
    over: dict[Node, Node] = field(default_factory=dict)

    @property
    def sources(self) -> set[Node]:
        return set().union(*self.reads.values())


Writer = dict[Node, Kernel]


class Program:
    """A graph of forward or backward, as kernels in their order; each value in memory belongs to one node, of which
    others are views."""

    def __init__(self, graph: Graph):
        nodes = list(graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.results = nodes[-1].args[0]
        self._owner = {node: node for node in nodes}
        for node in nodes:
            if is_view(node):
                self._owner[node] = self._owner[node.args[0]]
        self._reads: dict[Node, set[Node]] = {}  # values in memory that a node's work begins with
        self._ancestors: dict[Node, set[Node]] = {}  # among values in memory
        self._written = self._find_written(nodes)
        returned = self._owners(self.results)
        writer: Writer = {}
        kernels = self._launches(nodes, writer)
        self.kernels = _ordered(_fused(kernels, writer), writer)
        _drop_inner(self.kernels, returned)
        self._find_ends(returned)

    def _owners(self, arguments: Any) -> set[Node]:
        return {self._owner[node] for node in tree_leaves(arguments) if isinstance(node, Node)}

    def _find_written(self, nodes: list[Node]) -> set[Node]:
        needed = self._owners(self.results)
        readers: dict[Node, int] = {}
        for node in nodes:
            if node.op == "call_function" and not is_view(node):
                inputs = self._owners((node.args, node.kwargs))
                needed |= inputs if is_kernel(node) else set()
                for owner in inputs:
                    readers[owner] = readers.get(owner, 0) + 1
        written, has_cat = set[Node](), set[Node]()
        for node in nodes:
            if node.op != "call_function" or is_view(node):
                written.add(node)
                continue
            inputs = self._owners((node.args, node.kwargs))
            if name_of(node) == "cat":
                written |= inputs & has_cat  # one rotation of positions is as much as is done on the way
            reads = set[Node]()
            for owner in inputs:
                reads |= {owner} if owner in written else self._reads[owner]
            self._reads[node] = reads
            if any(owner in has_cat and owner not in written for owner in inputs) or name_of(node) == "cat":
                has_cat.add(node)
            many = len(reads) > (_READS if readers.get(node, 0) < 2 else _READS_TWICE)
            one = isinstance(value_of(node), Tensor)  # not several, of which each is a node of its own
            if not is_fusable(node) or node in needed or (one and (is_reduction(node) or many)):
                written.add(node)
        return written

    def _launches(self, nodes: list[Node], writer: Writer) -> list[Kernel]:
        """One for each written value, and who writes which."""
        kernels: list[Kernel] = []
        for node in nodes:
            if node.op != "call_function" or is_view(node):
                continue
            inputs = set[Node]()
            for owner in self._owners((node.args, node.kwargs)):
                inputs |= {owner} if owner in self._written else self._reads[owner]
            self._reads[node] = inputs
            if node not in self._written:
                continue
            self._ancestors[node] = inputs.union(*(self._ancestors.get(source, ()) for source in inputs))
            if is_item(node) and not is_fusable(node):  # its kernel is another's
                writer[node] = writer[node.args[0]]  # type: ignore[index]
                continue
            writer[node] = _launch(node, inputs, len(kernels))
            kernels.append(writer[node])
        return kernels

    def _find_ends(self, returned: set[Node]) -> None:
        """What each kernel reads last; a result may take the place of one such value that is as large and that no
        result beside it reads."""
        seen = set[Node]()
        for kernel in reversed(self.kernels):
            sources = kernel.sources - set(kernel.writes)
            kernel.last = sorted(sources - seen - returned, key=lambda node: node.name)
            seen |= sources
            for node in kernel.writes:
                if kernel.fused and not is_reduction(node):
                    self._write_over(kernel, node)
        self.unread = [node for node in self.inputs if node not in seen and node not in returned]

    def _write_over(self, kernel: Kernel, node: Node) -> None:
        """Weights and gradients are the caller's."""
        for source in kernel.last:
            if source in kernel.over.values() or source.name.startswith(("primals", "tangents")):
                continue
            readers = {reader for reader, sources in kernel.reads.items() if source in sources}
            if bytes_of(source) == bytes_of(node) and readers - self._ancestors[node] == {node}:
                kernel.over[node] = source
                return


def _launch(node: Node, inputs: set[Node], place: int) -> Kernel:
    """A kernel that writes this alone."""
    kernel = Kernel([node], {node: inputs}, is_fusable(node), (numel_of(node), 1), module_of(node), place, place)
    if is_reduction(node):
        work: Any = node.args[0] if is_item(node) else node
        source, rows, rank = work.args[0], max(1, numel_of(node)), value_of(work.args[0]).ndim
        dims = work.args[1] if len(work.args) > 1 and isinstance(work.args[1], list | tuple) else []
        kernel.range, kernel.reduces = (rows, numel_of(source) // rows), True
        kernel.by_columns = bool(dims) and all(dim % rank != rank - 1 for dim in dims)
    return kernel


def _fused(kernels: list[Kernel], writer: Writer) -> list[Kernel]:
    """Pair by pair, those first that read most together."""
    while True:
        pairs = []
        mergeable = [kernel for kernel in kernels if kernel.fused]
        for place, first in enumerate(mergeable):
            for second in mergeable[place + 1 :]:
                score = _score(first, second)
                distance = max(abs(first.begin - second.end), abs(second.begin - first.end))
                if score and (distance <= _TOO_FAR or first.by_columns != second.by_columns):
                    pairs.append((first.reduces == second.reduces, score, -distance, first, second))
        pairs.sort(key=lambda pair: pair[:3], reverse=True)
        gone = set[Kernel]()
        for *_, first, second in pairs:
            if first not in gone and second not in gone and not _must_wait(first, second, writer):
                _merge(first, second)
                writer.update(dict.fromkeys(second.writes, first))
                gone.add(second)
        if not gone:
            return kernels
        kernels = [kernel for kernel in kernels if kernel not in gone]


def _score(first: Kernel, second: Kernel) -> int:
    """Bytes that both touch, where they can be one; 0 where not."""
    touched = [set(kernel.writes) | kernel.sources for kernel in (first, second)]
    common = sum(bytes_of(node) for node in touched[0] & touched[1])
    if first.by_columns != second.by_columns:
        rows, columns = (second if first.by_columns else first).range
        swapped = first.range == second.range[::-1] and first.reduces and second.reduces
        large = rows * columns >= _MIXED_SIZE and rows >= max(_MIXED_ROWS, 2 * columns) and columns <= _MIXED_COLUMNS
        sums = all(name_of(node) == "sum" for node in (first if first.by_columns else second).writes)
        return rows * columns if swapped and large and sums and common else 0
    if first.reduces == second.reduces:
        return common if first.range == second.range else 0
    elementwise, reduction = (second, first) if first.reduces else (first, second)
    over = reduction.range[0] * reduction.range[1]
    return common if elementwise.range[0] in (over, reduction.range[0]) and not reduction.by_columns else 0


def _must_wait(first: Kernel, second: Kernel, writer: Writer) -> bool:
    """Whether a third kernel lies between them."""
    pair, reached = {first, second}, set[Kernel]()
    front = [kernel for one in pair for kernel in _before(one, writer) if kernel not in pair]
    while front:
        kernel = front.pop()
        if kernel in pair:
            return True
        if kernel not in reached:
            reached.add(kernel)
            front += _before(kernel, writer)
    return False


def _before(kernel: Kernel, writer: Writer) -> list[Kernel]:
    """Those that write what a kernel reads."""
    return [writer[node] for node in sorted(kernel.sources, key=lambda node: node.name) if node in writer]


def _merge(first: Kernel, second: Kernel) -> None:
    reduction = first if first.reduces and not first.by_columns else second
    first.range = reduction.range if first.reduces or second.reduces else first.range
    first.by_columns = first.by_columns and second.by_columns
    first.reduces = first.reduces or second.reduces
    first.writes += second.writes
    first.reads |= second.reads
    first.begin, first.end = min(first.begin, second.begin), max(first.end, second.end)


def _ordered(kernels: list[Kernel], writer: Writer) -> list[Kernel]:
    """By their first part, each after those that it waits for."""
    done: dict[Kernel, None] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        stack = [(kernel, False)]
        while stack:
            one, ready = stack.pop()
            if ready:
                done[one] = None
            elif one not in done:
                waits = [other for other in _before(one, writer) if other is not one and other not in done]
                stack += [(one, True), *((other, False) for other in reversed(waits))]
    return list(done)


def _drop_inner(kernels: Iterable[Kernel], returned: set[Node]) -> None:
    """What only its own kernel reads stays in registers."""
    outside = set(returned)
    for kernel in kernels:
        outside |= kernel.sources - set(kernel.writes)
    for kernel in kernels:
        if kernel.fused:
            kernel.writes = [node for node in kernel.writes if node in outside]
