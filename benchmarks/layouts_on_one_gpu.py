"""Every dimension with real kernels on one GPU: as rank r of a fake process group, so shapes, dtypes, kernels and the
compiler are those of the real run, and only what others would send is missing (and with it the meaning of the loss).

    python -m benchmarks.layouts_on_one_gpu [--json FILE] [--layers 4] [--only TEXT]

Prints, for each layout: milliseconds of a step, and the peak of live memory beside the planner's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # rank, layout
    "one process": (0, {}),
    "FSDP 8, zero 3": (0, {"dp_shard": 8}),
    "FSDP 8, zero 2": (3, {"dp_shard": 8, "zero": 2}),
    "ZeRO-1, 8": (3, {"dp_shard": 8, "zero": 1}),
    "HSDP 2 × 8": (9, {"dp_replicate": 2, "dp_shard": 8}),
    "TP 8": (7, {"tp": 8}),
    "FSDP 8 × TP 4": (5, {"dp_shard": 8, "tp": 4}),
    "CP 4, all-gather": (0, {"cp": 4}),
    "CP 4, all-gather, rank 3": (3, {"cp": 4}),
    "CP 4, Ulysses": (2, {"cp": 4, "cp_method": "ulysses"}),
    "FSDP 8 × CP 2": (3, {"dp_shard": 8, "cp": 2}),
    "full recompute": (0, {"dp_shard": 8, "recompute": "full"}),
    "selective recompute": (0, {"dp_shard": 8, "recompute": "selective"}),
    "recompute every 2nd": (0, {"dp_shard": 8, "recompute": "every:2"}),
    "recompute sqrt": (0, {"dp_shard": 8, "recompute": "sqrt"}),
    "chunked loss": (0, {"dp_shard": 8, "loss": "chunked"}),
    "offloaded optimizer": (0, {"dp_shard": 8, "offload": "optimizer"}),
    "offloaded parameters": (0, {"dp_shard": 8, "offload": "parameters"}),
    "offloaded activations": (0, {"dp_shard": 8, "offload": "activations"}),
    "compiled": (0, {"dp_shard": 8, "compile": True}),
    "compiled, TP 4": (1, {"dp_shard": 2, "tp": 4, "compile": True}),
    "compiled, selective recompute": (0, {"dp_shard": 8, "compile": True, "recompute": "selective"}),
    "compiled, CP 4": (2, {"cp": 4, "compile": True}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts, one process": (0, {}),
    "experts, FSDP 8": (0, {"dp_shard": 8}),
    "experts, EP 8": (3, {"dp_shard": 8, "ep": 8}),
    "experts, EP 4 × FSDP 2": (3, {"dp_shard": 8, "ep": 4}),
    "experts, EP 8 over FSDP 4 × TP 2": (3, {"dp_shard": 4, "tp": 2, "ep": 8}),
    "experts, TP 4": (3, {"tp": 4}),
    "experts, compiled": (0, {"dp_shard": 8, "compile": True}),
}
DENSE = {"preset": "llama3-8b", "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 7168, "vocabulary": 32768}
MOE = {"preset": "qwen3-30b-a3b", "experts": {"count": 32, "top_k": 8, "ffn": 768}, "vocabulary": 32768}


def measure(model: dict[str, Any], rank: int, layout: dict[str, Any], layers: int) -> dict[str, Any]:
    """Two warm steps and three timed ones, in this process, whose group is fake from now on."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardwise.parallel.apply import build_parallel
    from shardwise.parallel.mesh import build_mesh
    from shardwise.planner.memory import predict_memory
    from shardwise.planner.stacks import STACKS
    from shardwise.planner.subject import subject_of
    from shardwise.spec import Layout, Run
    from shardwise.training.loop import Trainer

    spread = Layout.load({"micro_batch": 2, **layout})
    run = Run.load(
        {
            "model": {**model, "layers": layers},
            "cluster": {"gpu": "h200-sxm", "gpus": spread.world, "gpus_per_node": spread.world},
            "layout": spread,
            "recipe": {"sequence": 4096, "batch_tokens": 4096 * 2 * spread.data_ranks, "steps": 5},
        }
    )
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spread.world)
    device = torch.device("cuda", 0)
    module = build_parallel(run, build_mesh(spread, "cuda"), device)
    trainer = Trainer(run, module, lambda: False)
    ids = torch.randint(run.model.vocabulary, (2, 4096), device=device)
    seconds = []
    for step in range(5):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        trainer._forward_backward([(ids, ids)], 4096 * 2)
        module.gradient_norm()
        trainer._update(2.0, 1e-5)
        module.drop_gradients()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    subject = subject_of(run.model, spread, run.cluster, STACKS["shardwise"], run.recipe, 1)
    return {
        "step_ms": 1000 * min(seconds[2:]),
        "live_gib": torch.cuda.max_memory_allocated() / 2**30,
        "predicted_live_gib": predict_memory(subject).live / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    cases = [(name, DENSE, *case) for name, case in LAYOUTS.items()]
    cases += [(name, MOE, *case) for name, case in EXPERTS.items()]
    results: dict[str, Any] = {}
    for name, model, rank, layout in cases:
        if options.only not in name:
            continue
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                row = pool.submit(measure, model, rank, layout, options.layers).result(timeout=240)
                error = row["predicted_live_gib"] / row["live_gib"] - 1
                print(
                    f"{name:34} {row['step_ms']:8.1f} ms  live {row['live_gib']:7.3f} GiB  "
                    f"predicted {row['predicted_live_gib']:7.3f} GiB  {100 * error:+6.2f} %",
                    flush=True,
                )
            except Exception as error:
                row = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
                print(f"{name:34} failed: {row['error']}", flush=True)
                traceback.print_exc(limit=-3)
        results[name] = {"layout": layout, "rank": rank, **row}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
