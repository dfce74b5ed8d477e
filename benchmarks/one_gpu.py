"""The planner's figures beside what `train` measures, on one GPU.

    python -m benchmarks.one_gpu OUT [--gpu h200-sxm]

Predictions are printed first. Then each Run trains a few steps on the built-in data; its median step and its allocator
peak stand beside them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from shardwise.planner.memory import predict_memory
from shardwise.planner.stacks import STACKS
from shardwise.planner.step import predict_step
from shardwise.planner.subject import Subject
from shardwise.spec import Run, load_run

_GPT2 = {"preset": "gpt2-124m", "vocabulary": 50304}
_XL = {"preset": "gpt2-1.5b", "vocabulary": 50304}
_WIDE = {"preset": "llama3-8b", "layers": 4}
_STEPS = 7

# name: model, sequence, micro-batch, micro-batches, zero, precision
RUNS: dict[str, tuple[Any, int, int, int, int, str]] = {
    "gpt2 124M, padded": (_GPT2, 1024, 32, 2, 0, "bf16"),
    "gpt2 124M, padded, large micro-batch": (_GPT2, 1024, 64, 1, 0, "bf16"),
    "gpt2 124M, 50257 columns": ("gpt2-124m", 1024, 32, 2, 0, "bf16"),
    "gpt2 124M, padded, fp16": (_GPT2, 1024, 32, 2, 0, "fp16"),
    "gpt2 1.5B, padded": (_XL, 1024, 8, 2, 0, "bf16"),
    "llama 1B": ("llama3.2-1b", 8192, 1, 2, 0, "bf16"),
    "llama 1B, large micro-batch": ("llama3.2-1b", 8192, 2, 1, 0, "bf16"),
    "llama 1B, FSDP over one": ("llama3.2-1b", 8192, 2, 1, 3, "bf16"),
    "llama 8B width, 4 layers": (_WIDE, 8192, 1, 2, 0, "bf16"),
    "llama 8B width, 4 layers, short": (_WIDE, 4096, 2, 2, 3, "bf16"),
}


def make_run(gpu: str, model: Any, sequence: int, micro_batch: int, count: int, zero: int, precision: str) -> Run:
    return load_run(
        {
            "model": model,
            "cluster": {"gpu": gpu},
            "layout": {"micro_batch": micro_batch, "zero": zero},
            "recipe": {
                "sequence": sequence,
                "batch_tokens": sequence * micro_batch * count,
                "steps": _STEPS,
                "precision": precision,
                "evaluation": {"tokens": 0},
                "optimizer": {"lr": 1e-4},
            },
        }
    )


def predict(run: Run, micro_batches: int) -> tuple[float, float]:
    """Tokens per second and live GiB."""
    subject = Subject(run.model, run.fixed_layout, run.cluster, STACKS["shardwise"], run.recipe.sequence, micro_batches)
    tokens = run.recipe.batch_sequences * run.recipe.sequence
    return tokens / predict_step(subject).seconds, predict_memory(subject).live / 2**30


def measure(run: Run, out: Path) -> tuple[float, float]:
    out.mkdir(parents=True)
    (out / "given.yaml").write_text(yaml.safe_dump(run.dump()))
    command = [sys.executable, "-m", "shardwise", "train", str(out / "given.yaml"), "--nproc", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    shutil.rmtree(out / "checkpoints")  # a small disk would not hold one of each
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][2:]
    return statistics.median(line["tokens_per_second"] for line in lines), lines[-1]["peak_memory_gib"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", default="h200-sxm")
    arguments = parser.parse_args()
    runs = {name: make_run(arguments.gpu, *given) for name, given in RUNS.items()}
    predicted = {name: predict(run, RUNS[name][3]) for name, run in runs.items()}
    print(f"{'':38}{'tokens/s':>12}{'measured':>10}{'error':>8}{'live GiB':>10}{'measured':>10}{'error':>8}")
    for number, (name, run) in enumerate(runs.items()):
        speed, memory = measure(run, arguments.out / str(number))
        said, live = predicted[name]
        print(
            f"{name:38}{said:12,.0f}{speed:10,.0f}{said / speed - 1:+8.1%}"
            f"{live:10.2f}{memory:10.2f}{live / memory - 1:+8.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
