"""Keys and values of the tokens that a decoder has seen, so that the next token costs one position, not all."""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """One block's keys and values, (B, capacity, kv_heads, their size) each; memory is taken at the first `extend`."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys (B, S, G, d) and values (B, S, G, e); returns all so far. S is 1 unless the cache is empty."""
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                part.new_empty(part.shape[0], self.capacity, *part.shape[2:]) for part in (keys, values)
            )
        elif keys.shape[1] != 1:
            raise ValueError(f"{keys.shape[1]} tokens cannot be appended at once: attention within them would be wrong")
        start, self.length = self.length, self.length + keys.shape[1]
        self._keys[:, start : self.length] = keys
        self._values[:, start : self.length] = values
        return self._keys[:, : self.length], self._values[:, : self.length]


class Cache:
    """One LayerCache per block, for at most `capacity` tokens."""

    def __init__(self, layers: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length
