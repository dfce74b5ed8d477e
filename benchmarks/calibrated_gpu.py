"""The planner after `calibrate`, beside compute-only steps of our trainer on one GPU. No training run calibrates it.

    python -m benchmarks.calibrated_gpu [--cluster FILE] [--quick] [--only TEXT] [--json FILE]

Calibrates this GPU (unless a Cluster file of it is given), predicts every case, and only then runs each in a process of
its own, as one rank of a fake process group where the layout has several (as benchmarks/layouts_on_one_gpu.py does):
kernels and shapes are the real ones, exchanges do nothing, and the planner counts none. Prints predicted beside
measured milliseconds of a step, the median and the 90th percentile of the absolute errors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

WARM, TIMED = 3, 5
GPT2 = {"preset": "gpt2-124m", "vocabulary": 50304}
MEDIUM = {"preset": "gpt2-350m", "vocabulary": 50304}
WIDE = {"preset": "llama3-8b", "layers": 4}
MOE = {"preset": "qwen3-30b-a3b", "layers": 4, "experts": {"count": 32, "top_k": 8, "ffn": 768}, "vocabulary": 32768}
# name: model, sequence, micro-batches, layout
CASES: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
    "gpt2 124M, 32 × 1024": (GPT2, 1024, 2, {"zero": 0, "micro_batch": 32}),
    "gpt2 124M, 4 × 1024": (GPT2, 1024, 2, {"zero": 0, "micro_batch": 4}),
    "gpt2 124M, compiled": (GPT2, 1024, 2, {"zero": 0, "micro_batch": 32, "compile": True}),
    "gpt2 350M, 16 × 1024, FSDP 8": (MEDIUM, 1024, 1, {"dp_shard": 8, "micro_batch": 16}),
    "llama 1B, 1 × 8192": ("llama3.2-1b", 8192, 2, {"zero": 0}),
    "llama 1B, 4 × 2048, chunked loss": ("llama3.2-1b", 2048, 2, {"zero": 0, "micro_batch": 4, "loss": "chunked"}),
    "llama 1B, full recompute": ("llama3.2-1b", 8192, 1, {"dp_shard": 8, "micro_batch": 2, "recompute": "full"}),
    "llama 1B, selective, FSDP 8": (
        "llama3.2-1b",
        4096,
        1,
        {"dp_shard": 8, "micro_batch": 4, "recompute": "selective"},
    ),
    "8B width, 4 layers, FSDP 64": (WIDE, 8192, 1, {"dp_shard": 64}),
    "8B width, 2 × 4096": (WIDE, 4096, 2, {"zero": 0, "micro_batch": 2}),
    "8B width, 16384, chunked, FSDP 64": (WIDE, 16384, 1, {"dp_shard": 64, "loss": "chunked"}),
    "8B width, compiled, FSDP 64": (WIDE, 8192, 1, {"dp_shard": 64, "compile": True}),
    "8B width, TP 4 × FSDP 8": (WIDE, 8192, 1, {"dp_shard": 8, "tp": 4}),
    "experts, 2 × 4096, FSDP 8": (MOE, 4096, 1, {"dp_shard": 8, "micro_batch": 2}),
}


def run_fields(name: str, cluster: dict[str, Any]) -> dict[str, Any]:
    from shardwise.spec import Layout

    model, sequence, count, fields = CASES[name]
    layout = Layout.load(fields)
    tokens = sequence * layout.micro_batch * count * layout.data_ranks
    return {
        "model": model,
        "cluster": {**cluster, "gpus": layout.world, "gpus_per_node": layout.world},
        "layout": layout,
        "recipe": {"sequence": sequence, "batch_tokens": tokens, "steps": WARM + TIMED},
    }


def predict(name: str, cluster: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds without exchanges, in all and by part."""
    from shardwise.planner.single import micro_batches_of
    from shardwise.planner.stacks import own_stack
    from shardwise.planner.step import predict_step
    from shardwise.planner.subject import subject_of
    from shardwise.spec import Run

    run = Run.load(run_fields(name, cluster))
    gpu = run.cluster.gpu.model_copy(update={"intra": None, "inter": None})
    silent = run.cluster.model_copy(update={"gpu": gpu})
    count = micro_batches_of(run.fixed_layout, run.recipe)
    subject = subject_of(run.model, run.fixed_layout, silent, own_stack(gpu), run.recipe, count)
    step = predict_step(subject)
    return {"predicted_ms": 1e3 * step.seconds, "parts_ms": {part: 1e3 * t for part, t in step.parts.items() if t}}


def measure(name: str, cluster: dict[str, Any]) -> float:
    """The median step in milliseconds, in this process, whose group is fake from now on."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardwise.parallel.apply import build_parallel
    from shardwise.parallel.mesh import build_mesh
    from shardwise.spec import Run
    from shardwise.training.loop import Trainer

    run = Run.load(run_fields(name, cluster))
    layout, sequence, count = run.fixed_layout, run.recipe.sequence, CASES[name][2]
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world)
    module = build_parallel(run, build_mesh(layout, "cuda"), device)
    trainer = Trainer(run, module, lambda: False)
    shape = (layout.micro_batch, sequence)
    batch = [(torch.randint(run.model.vocabulary, shape, device=device),) * 2 for _ in range(count)]
    taken = []
    for _ in range(WARM + TIMED):
        torch.cuda.synchronize()
        began = time.perf_counter()
        trainer._forward_backward(batch, count * shape[0] * sequence)
        module.gradient_norm().item()
        trainer._update(2.0, 1e-5)
        module.drop_gradients()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cluster:
        cluster = yaml.safe_load(options.cluster.read_text())
    else:
        import shardwise

        cluster = shardwise.calibrate(quick=options.quick, say=print).dump()
    rows = {name: predict(name, cluster) for name in CASES if options.only in name}
    print(f"{'':36}{'predicted':>10}{'measured':>10}{'error':>9}   ms a step")
    for name, row in rows.items():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                row["measured_ms"] = pool.submit(measure, name, cluster).result(timeout=240)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                print(f"{name:36} failed: {row['failed']}", flush=True)
                continue
        row["error"] = row["predicted_ms"] / row["measured_ms"] - 1
        print(f"{name:36}{row['predicted_ms']:10.1f}{row['measured_ms']:10.1f}{row['error']:+9.1%}", flush=True)
    errors = sorted(abs(row["error"]) for row in rows.values() if "error" in row)
    if errors:
        ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        print(f"{len(errors)} of {len(rows)} cases: median error {statistics.median(errors):.1%}, p90 {ninth:.1%}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "cluster": cluster}, indent=1, default=str))


if __name__ == "__main__":
    main()
