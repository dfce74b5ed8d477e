"""A model of PyTorch's CUDA caching allocator, through which a stream of allocations is replayed.

Rules and constants as in c10/cuda/CUDACachingAllocator.cpp: requests are rounded up to 512 bytes. Those of at most
1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments of their own
size in steps of 2 MiB. The smallest free block that is large enough is taken, and split where enough is left;
neighbours merge. Each stream has blocks of its own. With expandable segments there is one segment per stream and pool,
which grows by pages of 2 or 20 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 2**20
SMALL_REQUEST, SMALL_SEGMENT = MIB, 2 * MIB
MIDDLE_REQUEST, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB
STEP = 2 * MIB
UNIT = 512


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    address: int
    segment: int  # the first address of its segment
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class Pool:
    """The blocks of one stream and size class. `reserved`: bytes asked of the driver, which never shrink."""

    def __init__(self, *, small: bool, expandable: bool):
        self.reserved = 0
        self._small, self._expandable = small, expandable
        self._free: list[tuple[int, int]] = []  # (size, address)
        self._blocks: dict[int, _Block] = {}  # free ones, by address
        self._next = 0  # address of the next segment; they never touch
        self._end: _Block | None = None  # the last block of the expandable segment

    def allocate(self, size: int) -> _Block:
        place = bisect_left(self._free, (size, -1))
        block = self._take(self._free[place]) if place < len(self._free) else self._grow(size)
        rest = block.size - size
        if rest >= UNIT if self._small or self._expandable else rest > SMALL_REQUEST:
            self._split(block, size)
        block.free = False
        return block

    def release(self, block: _Block) -> None:
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take((other.size, other.address))
                block = self._join(other, block) if other.address < block.address else self._join(block, other)
        self._keep(block)

    def _grow(self, size: int) -> _Block:
        if self._expandable:
            return self._expand(size)
        length = SMALL_SEGMENT if self._small else MIDDLE_SEGMENT if size < MIDDLE_REQUEST else -(-size // STEP) * STEP
        self.reserved += length
        block = _Block(length, self._next, self._next)
        self._next += 2 * length
        return block

    def _expand(self, size: int) -> _Block:
        """Map as many pages behind the end as are missing; a free block at the end is part of it."""
        page = SMALL_SEGMENT if self._small else MIDDLE_SEGMENT
        last = self._end
        tail = last if last is not None and last.free else None
        missing = -(-(size - (tail.size if tail else 0)) // page) * page
        self.reserved += missing
        new = _Block(missing, self._next, 0, before=last)
        self._next += missing
        if last is not None:
            last.after = new
        self._end = new
        if tail is not None:
            self._take((tail.size, tail.address))
            return self._join(tail, new)
        return new

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.address + size, block.segment, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        if self._end is block:
            self._end = rest
        block.size, block.after = size, rest
        self._keep(rest)

    def _join(self, first: _Block, second: _Block) -> _Block:
        first.size, first.after = first.size + second.size, second.after
        if second.after is not None:
            second.after.before = first
        if self._end is second:
            self._end = first
        first.free = True
        return first

    def _keep(self, block: _Block) -> None:
        insort(self._free, (block.size, block.address))
        self._blocks[block.address] = block

    def _take(self, key: tuple[int, int]) -> _Block:
        del self._free[bisect_left(self._free, key)]
        return self._blocks.pop(key[1])


def reserved_peak(stream: Iterable[tuple[int, int, str]], *, expandable: bool) -> int:
    """Bytes that the allocator has reserved in the end, which is also the most. stream: (number, size, CUDA stream) in
    order; a size of 0 releases the block of that number."""
    pools: dict[tuple[str, bool], Pool] = {}
    held: dict[int, tuple[Pool, _Block]] = {}
    for number, size, name in stream:
        if size == 0:
            pool, block = held.pop(number)
            pool.release(block)
            continue
        rounded = -(-size // UNIT) * UNIT
        small = rounded <= SMALL_REQUEST
        if (name, small) not in pools:
            pools[name, small] = Pool(small=small, expandable=expandable)
        pool = pools[name, small]
        held[number] = pool, pool.allocate(rounded)
    return sum(pool.reserved for pool in pools.values())
