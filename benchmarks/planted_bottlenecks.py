"""Does `profile` name a bottleneck that was planted? `python -m benchmarks.planted_bottlenecks [CAUSE …] [-o FILE]`.

On one GPU with GPT-2 124M, else on CPU ranks with a tiny model; an exposed all-gather needs two ranks, so on one GPU it
is left out. Prints one line per cause, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import shardwise.verbs.profile as verb
from shardwise.spec import Run
from shardwise.spec.presets import gpu_called

# In the rank's process, before it trains. {wait}: seconds, more than a step takes.
_PATCHES = {
    "input": """
from shardwise.training.batches import Batches
read = Batches._read
def slow(self, index):
    time.sleep({wait})
    return read(self, index)
Batches._read = slow
""",
    "recompilation": """
import torch
from shardwise.training.loop import Trainer
update = Trainer._update
@torch.compile(backend="eager", dynamic=False)
def twice(x):
    for _ in range(200):
        x = 2 * x
    return x
sizes = iter(range(2, 100))
def recompiling(self, norm, rate):
    twice(torch.ones(next(sizes), device=self.device))
    update(self, norm, rate)
Trainer._update = recompiling
""",
    "synchronisation": """
import torch
from shardwise.training.loop import Trainer
update = Trainer._update
def waiting(self, norm, rate):
    for _ in range(4):
        update(self, norm, rate)
        torch.cuda.synchronize()
        time.sleep({wait} / 4)
Trainer._update = waiting
""",
    "checkpoint": """
from torch.profiler import record_function
from shardwise.training.loop import Trainer
steps = Trainer.steps
def saving(self, *arguments):
    for step in steps(self, *arguments):
        yield step
        with record_function("dcp.save"):
            time.sleep({wait})
Trainer.steps = saving
""",
    "exposed all_gather": """
import torch.distributed as dist
def again(real):
    def gather(*arguments, **options):
        for _ in range(20):
            real(*arguments, **dict(options, async_op=False))
        return real(*arguments, **options)
    return gather
for name in ("all_gather_into_tensor", "all_gather_single"):
    if hasattr(dist, name):
        setattr(dist, name, again(getattr(dist, name)))
""",
    "host-bound": "",  # a tiny batch
}
_WORKER = "import sys, time\n{patch}\nfrom shardwise.verbs.profile_rank import main\nsys.exit(main())"


def run_of(cause: str, ranks: int) -> Run:
    cuda = torch.cuda.is_available()
    chip = gpu_called(torch.cuda.get_device_name()) if cuda else None
    layout: dict[str, Any] = {"dp_shard": ranks, "zero": 3 if ranks > 1 else 0, "micro_batch": 1}
    recipe: dict[str, Any] = {"sequence": 1024, "batch_tokens": 16384, "steps": 10, "precision": "bf16"}
    if cuda:
        layout["micro_batch"] = 8
    else:
        recipe |= {"sequence": 64, "batch_tokens": 256, "precision": "fp32"}
    if cause == "host-bound":
        layout["micro_batch"] = 1
        recipe |= {"sequence": 32, "batch_tokens": 32 * ranks}
    cluster = {"gpu": chip.name if chip else "cpu", "gpus": ranks}
    model = "gpt2-124m" if cuda else "tiny-llama"
    return Run.load({"model": model, "cluster": cluster, "layout": layout, "recipe": recipe})


def main() -> int:
    cuda = torch.cuda.is_available()
    possible = [
        cause
        for cause in _PATCHES
        if (cause != "synchronisation" or cuda) and (cause != "exposed all_gather" or not cuda or two_gpus())
    ]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("causes", nargs="*", default=possible)
    parser.add_argument("-o", "--out", type=Path)
    words = parser.parse_args()
    results = []
    for cause in words.causes or possible:
        ranks = 2 if cause == "exposed all_gather" else 1
        patch = _PATCHES[cause].replace("{wait}", "0.3")
        verb.WORKER = (sys.executable, "-c", _WORKER.format(patch=patch))
        with tempfile.TemporaryDirectory() as directory:
            answer = verb.profile(run_of(cause, ranks), out=directory, steps=2, nproc=ranks, say=lambda line: None)
        named = answer.diagnosis.bottleneck
        results.append({"planted": cause, "named": named, "share": answer.diagnosis.share, "right": named == cause})
        print(f"{cause:<20} named {named:<20} {answer.diagnosis.share:4.0%} of {answer.mean.seconds:.3f} s", flush=True)
    if words.out:
        words.out.write_text(json.dumps({"chip": answer.chip or "cpu", "results": results}, indent=1) + "\n")
    return 0 if all(item["right"] for item in results) else 1


def two_gpus() -> bool:
    return torch.cuda.device_count() > 1


if __name__ == "__main__":
    sys.exit(main())
