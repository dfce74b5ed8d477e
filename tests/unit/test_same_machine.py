"""Planner and trainer describe the same machine (`tests/same_machine.py`).

SHARDWISE_SAME_MACHINE: how many layouts are drawn. Here, of dense models on data-parallel layouts, where the peak as a
whole agrees; `python tests/same_machine.py` lists what does not yet, part by part, of all layouts.
"""

from __future__ import annotations

import os
from itertools import islice

from same_machine import agree, compare, draws
from shardwise.spec import Run

COUNT, SEED = int(os.environ.get("SHARDWISE_SAME_MACHINE", "10")), int(os.environ.get("SHARDWISE_SEED", "7"))


def data_parallel(run: Run) -> bool:
    layout = run.fixed_layout
    return not run.model.experts and layout.tp == layout.cp == layout.pp == 1 and layout.offload == "none"


def test_drawn_layouts_are_what_was_planned() -> None:
    print(f"{COUNT} layouts, seed {SEED}")
    runs = list(islice(filter(data_parallel, draws(SEED)), COUNT))
    found = list(compare(runs))
    wrong = [str(one) for one in found if not agree(sum(one.found.values()), one.planned.live)]
    assert len(found) == COUNT and not wrong, "\n".join(wrong)
