"""Planner and trainer describe the same machine (`tests/same_machine.py`): of 200 layouts that `plan` considers for
tiny models, drawn at random, every part of memory is what the rehearsal finds, within 6 % or 1 MiB.

One in SHARE of them is tried; SHARDWISE_PARITY=all tries all. SHARDWISE_SEED: draw others.
"""

from __future__ import annotations

import os
from itertools import islice

import pytest

from same_machine import compare, draws

COUNT, SEED = 200, int(os.environ.get("SHARDWISE_SEED", "7"))
SHARE = 1 if os.environ.get("SHARDWISE_PARITY") == "all" else 20


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_drawn_layouts_are_what_was_planned(kind: str) -> None:
    print(f"{COUNT // SHARE} of {COUNT} layouts, {kind}, seed {SEED}")
    runs = list(islice(draws(SEED, kind), 0, COUNT // 2, SHARE))
    found = list(compare(runs, SEED))
    wrong = [str(one) for one in found if one.disagreements]
    assert len(found) == len(runs) == -(-COUNT // 2 // SHARE)
    assert not wrong, f"seed {SEED}\n" + "\n".join(wrong)
