"""The main job in a minute: plan for two ranks, train on them, be interrupted, continue exactly, evaluate, sample.

Run it with `make demo`. It uses nothing but the command line that a user has.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "examples" / "tiny.yaml"
OUT = Path("runs") / "demo"
STEPS = 40


def start(out: Path) -> subprocess.Popen[bytes]:
    words = ["train", str(RUN.relative_to(ROOT)), "--nproc", "2", "--recipe.steps", str(STEPS), "--out", str(out)]
    print(f"\n$ shardwise {shlex.join(words)}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "shardwise", *words], cwd=ROOT)


def plan() -> subprocess.Popen[bytes]:
    """What `layout: auto` of the run chooses from; `train` takes the first of these that it can run."""
    model = str(RUN.relative_to(ROOT))
    words = ["plan", model, "--gpu", "cpu", "--gpus", "2", "--seq", "256", "--batch-tokens", "8192"]
    words += ["--precision", "fp32", "--top", "5"]
    print(f"$ shardwise {shlex.join(words)}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "shardwise", *words], cwd=ROOT)


def lines(out: Path) -> list[dict[str, float]]:
    path = ROOT / out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def expect(process: subprocess.Popen[bytes], code: int) -> None:
    if process.wait() != code:
        sys.exit(f"demo: exit code {process.returncode}, expected {code}")


def main() -> None:
    shutil.rmtree(ROOT / OUT, ignore_errors=True)
    interrupted, straight = OUT / "interrupted", OUT / "straight"

    expect(plan(), 0)
    process = start(interrupted)
    while len(lines(interrupted)) < STEPS // 2 and process.poll() is None:
        time.sleep(0.1)
    print("demo: sending SIGTERM", flush=True)
    process.send_signal(signal.SIGTERM)
    expect(process, 4)
    expect(start(interrupted), 0)

    print("\ndemo: the same run without the interruption, to compare with", flush=True)
    expect(start(straight), 0)

    print(f"\n$ shardwise generate {interrupted} --prompt 'def '", flush=True)
    words = ["generate", str(interrupted), "--prompt", "def ", "--tokens", "160"]
    expect(subprocess.Popen([sys.executable, "-m", "shardwise", *words], cwd=ROOT), 0)

    pairs = list(zip(lines(interrupted), lines(straight), strict=True))
    same = sum(all(left[key] == right[key] for key in ("step", "loss", "grad_norm", "lr")) for left, right in pairs)
    print(f"\nresume: {same}/{STEPS} steps identical")
    if same != STEPS:
        sys.exit(1)


if __name__ == "__main__":
    main()
