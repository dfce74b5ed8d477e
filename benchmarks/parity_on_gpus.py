"""Layouts on real GPUs against one of them: the parity matrix over NCCL, with CUDA's kernels.

    python -m benchmarks.parity_on_gpus one.pt                              one GPU: the references
    torchrun --nproc-per-node 2 -m benchmarks.parity_on_gpus one.pt         each layout of 2 ranks against them

Prints the largest difference of each quantity: in fp64 rounding alone, in bf16 beside that of one GPU from fp64.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from shardwise.spec import Run
from shardwise.training.parity import Trained, differences, train_few_steps

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"preset": "tiny-llama", "layers": 4, "hidden": 128, "ffn": 256, "heads": 8, "kv_heads": 4, "head_dim": 16,
              "vocabulary": 256, "tied": False, "qk_norm": True},
    "experts": {"preset": "tiny-moe", "layers": 2, "hidden": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "ffn": 256,
                "vocabulary": 256, "experts": {"count": 8, "top_k": 2, "ffn": 64, "shared_ffn": 64}},
}  # fmt: skip
LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}, {"dp_shard": 2}, {"tp": 2},
    {"tp": 2, "loss": "chunked"}, {"cp": 2}, {"cp": 2, "cp_method": "ring"}, {"cp": 2, "cp_method": "ulysses"},
    {"pp": 2, "schedule": "gpipe"}, {"pp": 2}, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"pp": 2, "schedule": "interleaved-zb", "virtual_stages": 2}, {"pp": 2, "schedule": "zbv", "virtual_stages": 2},
    {"pp": 2, "schedule": "dualpipev", "virtual_stages": 2}, {"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2},
    {"cp": 2, "ep": 2}, {"dp_shard": 2, "recompute": "full"}, {"dp_shard": 2, "recompute": "selective"},
    {"dp_shard": 2, "recompute": "sqrt"}, {"dp_shard": 2, "offload": "parameters"},
    {"dp_shard": 2, "offload": "optimizer"}, {"dp_shard": 2, "offload": "activations"},
    {"dp_shard": 2, "compile": True}, {"tp": 2, "compile": True},
]  # fmt: skip


def make_run(model: str, layout: dict[str, Any], precision: str) -> Run:
    return Run.load(
        {
            "model": MODELS[model],
            "cluster": {"gpu": "h200-sxm", "gpus": 2, "gpus_per_node": 2},
            "layout": layout,
            "recipe": {
                "sequence": 64, "batch_tokens": 64 * 8, "steps": 3, "precision": precision,
                "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5, "clip": 1.0},
                "schedule": {"name": "constant"},
                "balance": {"auxiliary": 0.01} if model == "experts" else {},
            },
        }
    )  # fmt: skip


def main() -> None:
    path = sys.argv[1]
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29555", rank=0, world_size=1, device_id=device)
        torch.save(
            {(m, p): train_few_steps(make_run(m, {}, p), device) for m in MODELS for p in ("fp64", "bf16")}, path
        )
        dist.destroy_process_group()
        return
    dist.init_process_group("nccl", device_id=device)
    references: dict[tuple[str, str], Trained] = torch.load(path, weights_only=False)
    for model in MODELS:
        for layout in LAYOUTS:
            if "ep" in layout and model != "experts":
                continue
            if layout.get("pp", 1) * layout.get("virtual_stages", 1) > MODELS[model]["layers"]:
                continue
            for precision in ("fp64", "bf16"):
                if precision == "fp64" and layout.get("cp_method") == "ring" and model == "experts":
                    continue
                _one(model, layout, precision, references, device)
    dist.destroy_process_group()


def _one(model: str, layout: dict[str, Any], precision: str, references: Any, device: torch.device) -> None:
    name = f"{model:8} {precision} {' '.join(f'{key} {value}' for key, value in layout.items()):48}"
    torch._dynamo.reset()  # or the compiler's limit of versions of a block counts those of other runs
    try:
        found = differences(train_few_steps(make_run(model, layout, precision), device), references[model, precision])
        text = "  ".join(f"{quantity} {value:.1e}" for quantity, value in found.items())
    except Exception as error:  # every rank fails alike, or the job hangs and is killed from outside
        text = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if dist.get_rank() == 0:
            traceback.print_exc(limit=-4)
    if dist.get_rank() == 0:
        print(name, text, flush=True)


if __name__ == "__main__":
    main()
