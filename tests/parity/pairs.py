"""Every pair that docs/layouts.md allows, trained beside one process. Ten minutes or so, therefore not a test.

python tests/parity/pairs.py [TEXT …]        only pairs with one of these in their names
"""

import sys
from itertools import combinations
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from layouts_page import CHOICES, reasons, together  # noqa: E402
from matrix import TOLERANCE, compare, failures, largest_micro_batch, layers_for, make_run, reference, refusals  # noqa: E402

from ranks import RankPool  # noqa: E402

_BY_NAME = {"compile", "async_tp"}  # the compiler is tested in fp32, and async_tp needs CUDA


def main() -> None:
    pools: dict[int, RankPool] = {}

    def ranks(world: int) -> RankPool:
        if world not in pools:
            pools[world] = RankPool(world)
        return pools[world]

    same, wrong = 0, 0
    for left, right in combinations(CHOICES, 2):
        name = f"{left} × {right}"
        layout = together(left, right)
        fields = [set(CHOICES[choice]) - {"dp_shard", "virtual_stages"} for choice in (left, right)]
        if _BY_NAME & {left, right} or fields[0] & fields[1] or reasons(layout):
            continue
        if len(sys.argv) > 1 and not any(text in name for text in sys.argv[1:]):
            continue
        model = next((model for model in ("deepseek", "llama") if not refusals(model, layout)), None)
        if model is None:
            print(f"not for these models: {name}: {refusals('llama', layout)[0]}", flush=True)
            continue
        run = make_run(model, layout, "fp64", largest_micro_batch(layout), layers_for(layout))
        try:
            found = ranks(run.layout.world).run(compare, run, reference(ranks, model, "fp64", run.model.layers))
            problems = failures(found, "fp64")
        except AssertionError as error:
            problems = str(error).splitlines()[-1:]
            pools.pop(run.layout.world).close()
        same, wrong = same + (not problems), wrong + bool(problems)
        print(f"{'WRONG' if problems else 'same '} {name} ({model}) {' '.join(problems[:2])}", flush=True)
    print(f"{same} the same to {TOLERANCE['fp64']:g}, {wrong} not")
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
