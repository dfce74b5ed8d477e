"""Planner and trainer describe the same machine: layouts that `plan` considers for tiny models, drawn at random, each
rehearsed, and every part of memory compared.

    python tests/same_machine.py [COUNT] [SEED] [dense|experts]        every disagreement, with both sides
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.planner.candidates import spaces, variants
from shardwise.planner.memory import predict_moments
from shardwise.planner.memory.activations import IMBALANCE
from shardwise.planner.single import refusals
from shardwise.rehearsal.child import in_children
from shardwise.rehearsal.rank import on_cpu
from shardwise.spec import Run
from shardwise.spec.memory import PARTS, Memory
from shardwise.verbs.rehearse import subject_of_run

MIB = 2**20
SHARE = 0.06  # of the part


@dataclass(frozen=True)
class Compared:
    """One rank of one Run: bytes by part as rehearsed, and the moment that the planner has for it."""

    run: Run
    rank: int
    found: dict[str, float]
    planned: Memory
    where: str

    @property
    def disagreements(self) -> list[str]:
        return [part for part in PARTS if not agree(self.found[part], getattr(self.planned, part))]

    def __str__(self) -> str:
        changes = {
            key: value for key, value in self.run.fixed_layout.dump().items() if value not in (1, "none", "full")
        }
        rows = " ".join(
            f"{part} {self.found[part] / MIB:.1f}/{getattr(self.planned, part) / MIB:.1f}"
            for part in self.disagreements
        )
        batch = (self.run.recipe.batch_tokens or 0) // self.run.recipe.sequence
        return (
            f"{rows} | peak {self.where}, planned {self.planned.event} | rank {self.rank} {changes} batch {batch} "
            f"{self.run.model.name} {self.run.recipe.sequence}"
        )


def agree(found: float, planned: float) -> bool:
    """Within 6 % or 1 MiB."""
    return abs(found - planned) <= max(SHARE * max(found, planned), MIB)


def draws(seed: int, kind: str = "") -> Iterator[Run]:
    """Tiny models (dense, with experts, or any), random clusters, and of what `plan` considers for them any one
    layout."""
    wanted = {"": (True, False), "dense": (False,), "experts": (True,)}[kind]
    return (run for run in _draws(seed) if bool(run.model.experts) in wanted)


def _draws(seed: int) -> Iterator[Run]:
    random_ = random.Random(seed)
    while True:
        run = _run(random_)
        rejected: Counter[str] = Counter()
        choices = spaces(run.model, run.cluster, run.recipe, rejected)
        if not choices:
            continue
        space = random_.choice(choices)
        split, size = random_.choice(space.splits), random_.randrange(len(space.sizes))
        schedules = [item for item, able in zip(space.schedules, space.allowed[size], strict=True) if able]
        schedule, virtual = random_.choice(schedules)
        loss, offload = random_.choice([*variants(run.cluster), *[("full", "none"), ("chunked", "none")] * 4])
        changes = {
            "micro_batch": space.sizes[size][0],
            "recompute": random_.choice(space.recomputes),
            "schedule": schedule,
            "virtual_stages": virtual,
            "loss": loss,
            "offload": offload,
        }
        if split.cp > 1:
            changes["cp_method"] = random_.choice(["allgather", "ring", "ulysses"])
        run = run.replace(layout=split.model_copy(update=changes))
        if not any(refusals(run.model, run.fixed_layout, run.cluster, run.recipe)):
            yield run


def _run(random_: random.Random) -> Run:
    kind = random_.choice(["llama", "llama", "gpt", "moe"])
    heads, dim = random_.choice([4, 8]), random_.choice([32, 64])
    model: dict[str, Any] = {
        "name": f"tiny-{kind}",
        "layers": random_.randint(2, 5),
        "hidden": heads * dim,
        "heads": heads,
        "ffn": heads * dim * random_.choice([2, 4]),
        "vocabulary": random_.choice([1024, 4096, 8192]),
        "max_sequence": 2048,
        "tied": random_.random() < 0.4,
    }
    if kind == "gpt":
        model |= {"positions": "learned", "norm": "layernorm", "activation": "gelu", "norm_bias": True}
    else:
        model["kv_heads"] = random_.choice([heads, heads // 2])
    if kind == "moe":
        model["experts"] = {"count": 8, "top_k": 2, "ffn": 128, "shared_ffn": random_.choice([0, 128])}
    gpus = random_.choice([1, 2, 4, 8, 16])
    sequence = random_.choice([256, 512, 1024])
    return Run.load(
        {
            "model": model,
            "cluster": {
                "gpu": random_.choice(["h100-sxm", "a100-80-sxm"]),
                "gpus": gpus,
                "gpus_per_node": min(gpus, 8),
            },
            "recipe": {"sequence": sequence, "batch_tokens": sequence * gpus * random_.choice([1, 2]), "steps": 2},
        }
    )


def compare(runs: list[Run], seed: int = 0) -> Iterator[Compared]:
    """Each on a random pipeline rank, whose experts get as many tokens as the planner thinks."""
    random_ = random.Random(seed)
    calls = []
    for run in runs:
        layout = run.fixed_layout
        per_stage = layout.world // layout.pp
        calls.append((run, random_.randrange(layout.pp) * per_stage, 2, IMBALANCE, None))
    for (run, rank, *_), found in zip(calls, in_children(on_cpu, calls), strict=True):
        layout = run.fixed_layout
        moments = predict_moments(subject_of_run(run), rank // (layout.world // layout.pp))
        yield Compared(
            run, rank, found["parts"], _moment(moments, found["parts"]), f"{found['peak_op']} in {found['peak_module']}"
        )


def _moment(moments: list[Memory], found: dict[str, float]) -> Memory:
    """The planner's peak; or of moments that are as full, within the tolerance, the one most like the peak found."""
    close = [memory for memory in moments if agree(memory.live, moments[0].live)]
    return min(close, key=lambda memory: sum(not agree(found[part], getattr(memory, part)) for part in PARTS))


def main(count: int = 40, seed: int = 0, kind: str = "") -> None:
    stream = draws(seed, kind)
    runs = [next(stream) for _ in range(count)]
    bad: Counter[str] = Counter()
    for one in compare(runs, seed):
        live = sum(one.found.values())
        if one.disagreements:
            bad[" ".join(one.disagreements)] += 1
            print(f"{one.planned.live / live - 1:+.1%} {one}", flush=True)
        if not agree(one.planned.live, live):
            bad["LIVE"] += 1
    print(f"{count} {kind} drawn with seed {seed}: {dict(bad)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:4])
