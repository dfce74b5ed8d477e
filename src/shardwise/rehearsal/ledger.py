"""The ledger: every block of memory that a step asked for, when, where and what for; and what was alive at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shardwise.spec.memory import PARTS

ROUND = 512  # bytes: what torch's CUDA allocator rounds requests to
FOREVER = 2**62


@dataclass(slots=True)
class Block:
    """One storage from its allocation to its release; `begin` and `end` are numbers of events.

    kind: a part of Memory, `host`, or "" for what is told apart by its life alone. forward: it was allocated in a
    forward pass, `call` that of the block (or other unit) that ran, 0 outside of any. backward: it was allocated in
    one, perhaps in a forward that is done again there. stream: which of FSDP2's.
    """

    size: int
    kind: str
    operator: str
    module: str
    begin: int
    end: int = FOREVER
    forward: bool = False
    call: int = 0
    backward: bool = False
    outlives: bool = False  # that call, or the forward
    stream: str = ""


@dataclass
class Ledger:
    """Blocks in order of allocation, and the sum of those alive after each event (host memory apart)."""

    blocks: list[Block] = field(default_factory=list)
    live: int = 0
    host: int = 0
    events: list[tuple[int, bool]] = field(default_factory=list)  # (number of the block, allocated or freed)
    sizes: list[int] = field(default_factory=list)  # live bytes after each event
    start: int = 0  # event at which the reported step begins
    host_peak: int = 0

    def allocate(self, block: Block) -> int:
        """Returns the block's number."""
        block.begin = len(self.events)
        self.blocks.append(block)
        number = len(self.blocks) - 1
        self._event(number, block, 1)
        return number

    def free(self, number: int, call: int, *, backward: bool = False) -> None:
        """call: the one that runs at the release, `backward` whether in a backward."""
        block = self.blocks[number]
        block.end, block.outlives = len(self.events), call != block.call or (backward and not block.backward)
        self._event(number, block, -1)

    def to_host(self, number: int) -> None:
        """A block that is on the device leaves it."""
        block = self.blocks[number]
        if block.end == FOREVER and block.kind != "host":
            self.live -= block.size
            self.sizes[-1] = self.live
            self.host += block.size
            self.host_peak = max(self.host_peak, self.host)
            block.kind = "host"

    def _event(self, number: int, block: Block, sign: int) -> None:
        if block.kind == "host":
            self.host += sign * block.size
            self.host_peak = max(self.host_peak, self.host)
        else:
            self.live += sign * block.size
        self.events.append((number, sign > 0))
        self.sizes.append(self.live)

    def begin(self) -> None:
        """What follows is the step that is reported."""
        self.start, self.host_peak = len(self.events), self.host

    def peak(self) -> int:
        """The event at which most is alive, of the reported step."""
        sizes = self.sizes
        return max(range(self.start, len(sizes)), key=sizes.__getitem__)

    def alive(self, event: int) -> list[Block]:
        """Blocks that are there after an event, on the device."""
        return [block for block in self.blocks if block.begin <= event < block.end and block.kind != "host"]

    def parts(self, event: int) -> Counter[str]:
        """Bytes by part of Memory after an event. Call at the end of the step: what lived how long is known then."""
        sums: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
        for block in self.alive(event):
            sums[part_of(block)] += block.size
        return sums

    def held(self, event: int, name: Callable[[Block], str]) -> Counter[str]:
        """Bytes after an event by any name of a block."""
        sums: Counter[str] = Counter()
        for block in self.alive(event):
            sums[name(block)] += block.size
        return sums


def part_of(block: Block) -> str:
    """What a forward leaves for the backward are activations, all else without a kind is temporary."""
    if block.kind:
        return block.kind
    return "activations" if block.forward and block.outlives else "transient"
