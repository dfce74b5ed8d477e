"""What measuring costs a training run that nobody profiles: `python -m benchmarks.always_on [--steps 40]`.

Trains GPT-2 124M on a GPU, or a small model on a CPU, as one rank and as `train` does, and adds up, step by step, the
time of everything that only measures: the step's record, its progress line, memory and utilisation, and what feeds the
report. Prints the share of the steps' time that they take, of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from shardwise.spec import load_run
from shardwise.spec.presets import gpu_called

_WORKER = """
import atexit, json, sys, time
from shardwise.training import loop, metrics
from shardwise.verbs.session import Session
spent = []
def timed(owner, name):
    real = getattr(owner, name)
    def call(*arguments, **named):
        began = time.perf_counter()
        try:
            return real(*arguments, **named)
        finally:
            spent.append(time.perf_counter() - began)
    setattr(owner, name, call)
timed(Session, "record")
timed(loop, "peak_memory_gib")
timed(metrics.Utilisation, "of")
atexit.register(lambda: open({file!r}, "w").write(json.dumps(spent)))
sys.argv = ["shardwise", *{words!r}]
from shardwise.cli.main import main
main()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    cuda = torch.cuda.is_available()
    chip = gpu_called(torch.cuda.get_device_name()) if cuda else None
    run = load_run(
        {
            "model": {"preset": "gpt2-124m", "vocabulary": 50304} if cuda else "tiny-llama",
            "cluster": {"gpu": chip.name if chip else "cpu"},
            "layout": {"micro_batch": 16 if cuda else 4, "zero": 0},
            "recipe": {
                "sequence": 1024 if cuda else 256,
                "batch_tokens": 16384 if cuda else 2048,
                "steps": steps,
                "precision": "bf16" if cuda else "fp32",
                "evaluation": {"tokens": 0},
            },
        }
    )
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        (out / "given.yaml").write_text(yaml.safe_dump(run.dump()))
        words = ["train", str(out / "given.yaml"), "--out", str(out / "run")]
        code = _WORKER.format(file=str(out / "spent.json"), words=words)
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **alone}, check=False,
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            print(done.stdout[-2000:] + done.stderr[-2000:])
            return 1
        spent = json.loads((out / "spent.json").read_text())
        lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    step = statistics.median(line["step_seconds"] for line in lines[3:])
    each = 3 * statistics.mean(sorted(spent)[: int(0.95 * len(spent))])  # three a step; the first ones import things
    where = torch.cuda.get_device_name() if cuda else "a CPU"
    print(f"{where}: {1e6 * each:.0f} µs of measuring in a step of {1e3 * step:.1f} ms: {each / step:.2%}")
    return 0 if each <= 0.01 * step else 1


if __name__ == "__main__":
    sys.exit(main())
