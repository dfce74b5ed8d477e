"""A tape of what is made and dropped: the planner's counterpart of the rehearsal's ledger."""

from __future__ import annotations

# The parts of Memory that change within a step, as they stand in a moment.
GRADIENTS, GATHERED, ACTIVATIONS, LOGITS, TRANSIENT = range(5)
Parts = tuple[float, float, float, float, float]  # bytes
NOTHING: Parts = (0.0, 0.0, 0.0, 0.0, 0.0)


class Tape:
    """Blocks by name. `moments`: (name of the block made last, bytes by part) wherever something is dropped after
    something was made, so that no fuller moment lies between two of them."""

    def __init__(self) -> None:
        self.now = [0.0, 0.0, 0.0, 0.0, 0.0]
        self.moments: list[tuple[str, Parts]] = []
        self._blocks: dict[str, tuple[int, float]] = {}
        self._last = ""

    def make(self, name: str, size: float, part: int = TRANSIENT) -> None:
        if size:
            self._blocks[name] = part, size
            self.now[part] += size
            self._last = name

    def drop(self, *names: str) -> None:
        """Those of them that are there."""
        if self._last:
            self.mark()
        for name in names:
            part, size = self._blocks.pop(name, (0, 0.0))
            self.now[part] -= size

    def mark(self) -> None:
        self.moments.append((self._last, self.parts))
        self._last = ""

    def rename(self, name: str, new: str) -> None:
        self._blocks[new] = self._blocks.pop(name)

    @property
    def parts(self) -> Parts:
        gradients, gathered, activations, logits, transient = self.now
        return gradients, gathered, activations, logits, transient


def plus(first: Parts, second: Parts, times: float = 1.0) -> Parts:
    """first + times × second"""
    a, b, c, d, e = first
    f, g, h, i, j = second
    return a + times * f, b + times * g, c + times * h, d + times * i, e + times * j
