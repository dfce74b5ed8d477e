"""Real `shardwise` processes on a run that takes a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

SECONDS = 120
RUN: dict[str, Any] = {
    "model": {"preset": "tiny-llama", "layers": 1, "hidden": 32, "ffn": 48, "head_dim": 8},
    "cluster": {"gpu": "cpu", "gpus": 2},
    "recipe": {
        "sequence": 32,
        "batch_tokens": 256,
        "steps": 12,
        "precision": "fp32",
        "optimizer": {"lr": 1e-3},
        "evaluation": {"tokens": 512},
        "checkpoint": {"every": 4, "keep": 10},
    },
}

# A rank that does something at a step, put in front of the command line: {rank} is an int, {step} the step in hand.
_PATCH = """
import os, signal, sys, time
from shardwise.parallel.module import ParallelModule
original, seen = ParallelModule.gradient_norm, [0]
def patched(module):
    seen[0] += 1
    rank, step = int(os.environ["RANK"]), seen[0]
    {action}
    return original(module)
ParallelModule.gradient_norm = patched
from shardwise.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def write_run(directory: Path, **recipe: Any) -> Path:
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, "recipe": {**RUN["recipe"], **recipe}}))
    return path


def start(
    *words: str | Path, launcher: tuple[str, ...] = ("-m", "shardwise"), **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output."""
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, output


def shardwise(*words: str | Path, **environment: str) -> tuple[int, str]:
    return finish(start(*words, **environment))


def launch_patched(action: str, ranks: int, *words: str | Path) -> tuple[int, str]:
    """`shardwise train` under the launcher, with `action` run on every rank in every step."""
    driver = (
        "import sys; from shardwise.launching import launch\n"
        f"sys.exit(launch([sys.executable, '-c', {_PATCH.format(action=action)!r}, *sys.argv[1:]], {ranks}, "
        "say=print, how_to_continue='continue'))"
    )
    return finish(start(*words, launcher=("-c", driver)))


def metrics(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_steps(process: subprocess.Popen[str], out: Path, steps: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len(metrics(out)) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def trajectory(out: Path) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in metrics(out)]
