import logging
from collections.abc import Callable, Iterator

import pytest

from ranks import RankPool

# It warns of every gathering of weights that are cut twice, which tests do to compare them.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """ranks(n): a pool of n gloo ranks that lives as long as the session."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools:
            pools[world] = RankPool(world)
        return pools[world]

    yield pool
    for each in pools.values():
        each.close()
