"""The planner after `calibrate`, beside what `train` measures, on CPU ranks of this machine over gloo.

    python -m benchmarks.calibrated_cpu [--nproc 2] [--cluster FILE] [--quick] [--page docs/accuracy.md] [--json FILE]

Calibrates (unless a Cluster file is given), predicts every layout and writes that down, and only then trains each for a
few steps under `profile`. Prints predicted beside measured step time and exposed communication, the errors, Kendall's τ
of the two orders, and the regret: how much slower the layout that was predicted to be fastest is than the fastest one.
Other work on the machine shows in all of it, so the idle share of the cores before each run is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from benchmarks.marked import write_marked

import shardwise
from shardwise.planner.single import judge
from shardwise.planner.stacks import own_stack
from shardwise.spec import Cluster, Run, load_run
from shardwise.verbs.calibrate import cluster_yaml

MODEL = {"name": "cpu-llama", "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocabulary": 4096,
         "max_sequence": 256}  # fmt: skip
SEQUENCE, BATCH = 256, 4096
STEPS = 3  # timed, and as many more under the profiler


def layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """Every dimension, with few and many micro-batches."""
    return {
        "DDP, micro-batch 4": {"dp_replicate": ranks, "zero": 0, "micro_batch": 4},
        "DDP, micro-batch 1": {"dp_replicate": ranks, "zero": 0},
        "DDP, full recompute": {"dp_replicate": ranks, "zero": 0, "micro_batch": 4, "recompute": "full"},
        "DDP, chunked loss": {"dp_replicate": ranks, "zero": 0, "micro_batch": 4, "loss": "chunked"},
        "ZeRO-1": {"dp_shard": ranks, "zero": 1, "micro_batch": 4},
        "FSDP, zero 2": {"dp_shard": ranks, "zero": 2, "micro_batch": 4},
        "FSDP, zero 3": {"dp_shard": ranks, "zero": 3, "micro_batch": 4},
        "FSDP, zero 3, micro-batch 1": {"dp_shard": ranks, "zero": 3},
        "TP": {"tp": ranks, "zero": 0, "micro_batch": 4},
        "CP, all-gather": {"cp": ranks, "zero": 0, "micro_batch": 4},
        "PP, 1F1B": {"pp": ranks, "zero": 0, "micro_batch": 4},
        "PP, GPipe": {"pp": ranks, "zero": 0, "micro_batch": 2, "schedule": "gpipe"},
    }


def make_run(cluster: Cluster, layout: dict[str, Any]) -> Run:
    return Run.load(
        {
            "model": MODEL,
            "cluster": cluster,
            "layout": layout,
            "recipe": {
                "sequence": SEQUENCE,
                "batch_tokens": BATCH,
                "steps": STEPS,
                "precision": "fp32",
                "evaluation": {"tokens": 0},
            },
        }
    )


def predicted(run: Run) -> dict[str, float]:
    found = judge(run.model, run.fixed_layout, run.cluster, run.recipe, own_stack(run.cluster.gpu))
    exposed = sum(found.step.parts[kind] for kind in ("data", "tensor", "context", "expert"))
    return {"seconds": found.step.seconds, "exposed_seconds": exposed}


def measured(run: Run, ranks: int) -> dict[str, float]:
    """The median step without the profiler, and the exposed communication of a step under it, of the critical rank."""
    with tempfile.TemporaryDirectory() as out:
        found = shardwise.profile(run, out=out, steps=STEPS, nproc=ranks, say=lambda line: None)
    assert found.measured is not None
    exposed = sum(seconds for stream, seconds in found.mean.exposed.items() if stream != "pipeline")
    return {"measured": found.measured.step_seconds, "measured_exposed": exposed}


def idle_share(seconds: float = 1.0) -> float:
    """Of this machine's cores, over the next second, by Linux's own count."""

    def look() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return numbers[3] + numbers[4], sum(numbers)

    (idle, total), _ = look(), time.sleep(seconds)
    later, whole = look()
    return (later - idle) / max(1, whole - total)


def kendall(pairs: list[tuple[float, float]]) -> float:
    """τ-a over (predicted, measured)."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = idle_share()
    if options.cluster:
        cluster = load_run({"model": MODEL, "cluster": str(options.cluster), "recipe": {"sequence": SEQUENCE}}).cluster
    else:
        cluster = shardwise.calibrate(nproc=options.nproc, quick=options.quick, say=print)
    runs = {name: make_run(cluster, layout) for name, layout in layouts(options.nproc).items()}
    rows: dict[str, dict[str, Any]] = {name: predicted(run) for name, run in runs.items()}
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="predicted-", delete=False) as file:
        json.dump(rows, file, indent=1)
    print(f"predicted first, in {file.name}; cores idle before calibration: {before:.0%}")
    print(f"{'':30}{'predicted':>10}{'measured':>10}{'error':>9}{'exposed':>10}{'measured':>10}{'idle':>6}")
    for name, run in runs.items():
        rows[name] |= {"idle": idle_share(), **measured(run, options.nproc)}
        row = rows[name]
        row["error"] = row["seconds"] / row["measured"] - 1
        row["exposed_error"] = (row["exposed_seconds"] - row["measured_exposed"]) / row["measured"]
        print(
            f"{name:30}{row['seconds']:10.3f}{row['measured']:10.3f}{row['error']:+9.1%}"
            f"{row['exposed_seconds']:10.3f}{row['measured_exposed']:10.3f}{row['idle']:6.0%}",
            flush=True,
        )
    answer = scores(rows) | {"idle_before_calibration": before}
    print(", ".join(f"{name} {value:.3f}" for name, value in answer.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, **answer, "cluster": yaml.safe_load(cluster_yaml(cluster))}))
    if options.page:
        write_page(options.page, rows, answer, cluster, options.nproc)


def scores(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    errors = sorted(abs(row["error"]) for row in rows.values())
    chosen = min(rows.values(), key=lambda row: row["seconds"])
    fastest = min(row["measured"] for row in rows.values())
    return {
        "median_error": statistics.median(errors),
        "median_exposed_error": statistics.median(abs(row["exposed_error"]) for row in rows.values()),
        "p90_error": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "kendall_tau": kendall([(row["seconds"], row["measured"]) for row in rows.values()]),
        "regret": chosen["measured"] / fastest - 1,
    }


def write_page(
    page: Path, rows: dict[str, dict[str, Any]], answer: dict[str, float], cluster: Cluster, ranks: int
) -> None:
    found = cluster.gpu.calibration
    assert found is not None
    lines = [
        f"`python -m benchmarks.calibrated_cpu --nproc {ranks}` on {found.device} ({os.cpu_count()} cores), "
        f"torch {found.torch}, {found.date}. Cores were {answer['idle_before_calibration']:.0%} idle before it began; "
        "`idle` is the same before each run. The predictions were written down first.",
        "",
        "| layout | predicted s | measured s | error | exposed, predicted s | measured s | idle |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {name} | {row['seconds']:.3f} | {row['measured']:.3f} | {row['error']:+.1%} | "
            f"{row['exposed_seconds']:.3f} | {row['measured_exposed']:.3f} | {row['idle']:.0%} |"
            for name, row in rows.items()
        ),
        "",
        f"Step time: median error {answer['median_error']:.1%}, p90 {answer['p90_error']:.1%}, Kendall τ "
        f"{answer['kendall_tau']:.2f}, regret {answer['regret']:.1%}. Exposed communication: median error "
        f"{answer['median_exposed_error']:.1%} of the step.",
    ]
    write_marked(page, f"calibrated_cpu {ranks}", lines)


if __name__ == "__main__":
    main()
