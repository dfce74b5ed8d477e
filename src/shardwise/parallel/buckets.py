"""Buckets: what is sent or updated together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_buckets(items: Iterable[Item], elements: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Items in their order, in lists of at most `most` elements, unless one alone has more."""
    bucket: list[Item] = []
    size = 0
    for item in items:
        more = elements(item)
        if bucket and size + more > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += more
    if bucket:
        yield bucket
