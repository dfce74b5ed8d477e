"""The matrix: layouts, models, and what it means that two trained the same."""

import os
from functools import cache
from typing import Any

import torch

from shardwise.parallel.gradients import local
from shardwise.spec import Run, load_run
from shardwise.spec.legality import illegal
from shardwise.training.parity import Trained, differences, train_few_steps
from shardwise.verbs.verify import EXACT

STEPS, SEQUENCES, SEQUENCE = 3, 8, 16
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}

DATA: dict[str, dict[str, Any]] = {
    "one process, FSDP": {"zero": 3},
    "DDP×2": {"dp_replicate": 2},
    "DDP×4": {"dp_replicate": 4},
    "small buckets": {"dp_replicate": 2, "bucket_mb": 1},
    "FSDP×2, zero 2": {"dp_shard": 2, "zero": 2},
    "FSDP×2, zero 3": {"dp_shard": 2},
    "FSDP×4, zero 2": {"dp_shard": 4, "zero": 2},
    "FSDP×4, zero 3": {"dp_shard": 4},
    "prefetch 0": {"dp_shard": 2, "prefetch": 0},
    "prefetch 2": {"dp_shard": 2, "prefetch": 2},
    "HSDP 2×2, zero 2": {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
    "HSDP 2×2, zero 3": {"dp_replicate": 2, "dp_shard": 2},
    "ZeRO-1×2": {"dp_shard": 2, "zero": 1},
    "ZeRO-1×4": {"dp_shard": 4, "zero": 1},
    "ZeRO-1, 2×2": {"dp_replicate": 2, "dp_shard": 2, "zero": 1},
    "chunked loss": {"loss": "chunked"},
}
TENSOR: dict[str, dict[str, Any]] = {
    "TP×2": {"tp": 2},
    "TP×4": {"tp": 4},
    "TP×2, chunked loss": {"tp": 2, "loss": "chunked"},
    "DDP×2 × TP×2": {"dp_replicate": 2, "tp": 2},
    "ZeRO-1×2 × TP×2": {"dp_shard": 2, "tp": 2, "zero": 1},
    "FSDP×2 × TP×2": {"dp_shard": 2, "tp": 2},
    "HSDP 2×2 × TP×2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
}
CONTEXT: dict[str, dict[str, Any]] = {
    "CP×2, all-gather": {"cp": 2},
    "CP×2, ring": {"cp": 2, "cp_method": "ring"},
    "CP×2, Ulysses": {"cp": 2, "cp_method": "ulysses"},
    "CP×4, all-gather": {"cp": 4},
    "CP×4, ring": {"cp": 4, "cp_method": "ring"},
    "CP×2, chunked loss": {"cp": 2, "loss": "chunked"},
    "CP×2, zero 3": {"cp": 2, "zero": 3},
    "FSDP×2 × CP×2, zero 2": {"dp_shard": 2, "cp": 2, "zero": 2},
    "DDP×2 × CP×2": {"dp_replicate": 2, "cp": 2},
    "ZeRO-1×2 × CP×2": {"dp_shard": 2, "cp": 2, "zero": 1},
    "CP×2 × TP×2, all-gather": {"cp": 2, "tp": 2},
    "CP×2 × TP×2, ring": {"cp": 2, "cp_method": "ring", "tp": 2},
    "CP×2 × TP×2, Ulysses": {"cp": 2, "cp_method": "ulysses", "tp": 2},
    "HSDP 2×2 × CP×2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
}
EXPERT: dict[str, dict[str, Any]] = {
    "EP×2, zero 3": {"dp_shard": 2, "ep": 2},
    "EP×4, zero 3": {"dp_shard": 4, "ep": 4},
    "EP×2 × FSDP×2, zero 2": {"dp_shard": 4, "ep": 2, "zero": 2},
    "EP×2 × FSDP×2, zero 3": {"dp_shard": 4, "ep": 2},
    "EP×2 × HSDP 2×2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "EP×2, ZeRO-1×4": {"dp_shard": 4, "ep": 2, "zero": 1},
    "EP×2 over TP×2": {"tp": 2, "ep": 2},
    "EP×2 over CP×2": {"cp": 2, "ep": 2},
    "EP×4 over FSDP×2 × TP×2": {"dp_shard": 2, "tp": 2, "ep": 4},
    "EP×2 in FSDP×2 × TP×2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "EP×2 × PP×2 × FSDP×2": {"pp": 2, "dp_shard": 2, "ep": 2},
    "EP×4 × PP×2 × FSDP×2 × TP×2": {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4},
}
_INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
_ZERO_BUBBLE = {"schedule": "interleaved-zb", "virtual_stages": 2}
_ZBV = {"schedule": "zbv", "virtual_stages": 2}
_DUAL = {"schedule": "dualpipev", "virtual_stages": 2}
PIPELINE: dict[str, dict[str, Any]] = {
    "PP×2, gpipe": {"pp": 2, "schedule": "gpipe"},
    "PP×2, 1f1b": {"pp": 2},
    "PP×2, interleaved": {"pp": 2, **_INTERLEAVED},
    "PP×2, interleaved-zb": {"pp": 2, **_ZERO_BUBBLE},
    "PP×2, zbv": {"pp": 2, **_ZBV},
    "PP×2, dualpipev": {"pp": 2, **_DUAL},
    "PP×2, chunked loss": {"pp": 2, "loss": "chunked"},
    "PP×4, 1f1b": {"pp": 4},
    "PP×4, interleaved": {"pp": 4, **_INTERLEAVED},
    "PP×4, interleaved-zb": {"pp": 4, **_ZERO_BUBBLE},
    "PP×4, zbv": {"pp": 4, **_ZBV},
    "PP×4, dualpipev": {"pp": 4, **_DUAL},
    "PP×2 × DDP×2": {"pp": 2, "dp_replicate": 2},
    "PP×2 × ZeRO-1×2": {"pp": 2, "dp_shard": 2, "zero": 1},
    "PP×2 × FSDP×2, zero 2": {"pp": 2, "dp_shard": 2, "zero": 2},
    "PP×2 × FSDP×2, zero 3": {"pp": 2, "dp_shard": 2},
    "PP×2 × FSDP×2, interleaved": {"pp": 2, "dp_shard": 2, **_INTERLEAVED},
    "PP×2 × FSDP×2, zbv": {"pp": 2, "dp_shard": 2, "zero": 2, **_ZBV},
    "PP×2 × HSDP 2×2": {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
    "PP×2 × TP×2": {"pp": 2, "tp": 2},
    "PP×2 × TP×2, zbv": {"pp": 2, "tp": 2, **_ZBV},
    "PP×2 × CP×2": {"pp": 2, "cp": 2},
    "PP×2 × FSDP×2 × TP×2": {"pp": 2, "dp_shard": 2, "tp": 2},
}
LAYOUTS = DATA | TENSOR | CONTEXT | EXPERT | PIPELINE
# Variations of others, which need not be tried with every model and in every way.
VARIATIONS = {
    "DDP×4", "small buckets", "FSDP×4, zero 2", "prefetch 0", "prefetch 2", "HSDP 2×2, zero 2", "ZeRO-1, 2×2",
    "TP×2, chunked loss", "CP×4, ring", "CP×2, chunked loss", "ZeRO-1×2 × CP×2", "CP×2 × TP×2, Ulysses",
    "EP×2, ZeRO-1×4", "EP×2 × FSDP×2, zero 2", "PP×4, interleaved", "PP×4, interleaved-zb", "PP×4, zbv",
    "PP×4, dualpipev", "PP×2, chunked loss", "PP×2 × ZeRO-1×2", "PP×2 × FSDP×2, interleaved", "PP×2 × FSDP×2, zbv",
    "PP×2 × TP×2, zbv", "one process, FSDP", "FSDP×2, zero 2", "ZeRO-1×4", "DDP×2 × TP×2", "CP×4, all-gather",
    "FSDP×2 × CP×2, zero 2", "PP×2, gpipe",
}  # fmt: skip

# Sizes that shards of 4 ranks do not divide; for tp 4 the llama has fewer KV heads than ranks.
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"preset": "tiny-gpt", "layers": 4, "hidden": 36, "ffn": 52, "heads": 4, "kv_heads": 4, "head_dim": 9,
            "vocabulary": 68, "max_sequence": 32},
    "llama": {"preset": "tiny-llama", "layers": 4, "hidden": 36, "ffn": 52, "heads": 8, "kv_heads": 2, "head_dim": 6,
              "vocabulary": 68, "tied": False, "qk_norm": True},
    "qwen-moe": {"preset": "tiny-moe", "layers": 4, "hidden": 36, "heads": 4, "kv_heads": 2, "head_dim": 10, "ffn": 52,
                 "vocabulary": 68, "qk_norm": True, "experts": {"count": 8, "top_k": 3, "ffn": 12}},
    "deepseek": {"preset": "tiny-moe", "layers": 4, "hidden": 36, "heads": 4, "ffn": 52, "vocabulary": 68,
                 "tied": False,
                 "latent": {"query_rank": 10, "kv_rank": 9, "nope_dim": 6, "rope_dim": 4, "value_dim": 5},
                 "experts": {"count": 8, "top_k": 3, "ffn": 12, "shared_ffn": 20, "dense_layers": 1,
                             "router": "sigmoid", "router_bias": True, "groups": 4, "top_groups": 2, "scale": 1.5}},
}  # fmt: skip
BALANCE = {"qwen-moe": {"auxiliary": 0.1}, "deepseek": {"auxiliary": 0.1, "bias_rate": 0.01}}


# With SHARDWISE_PARITY=all nothing is left out; else what differs little is taken in turns, to be done in minutes.
ALL = os.environ.get("SHARDWISE_PARITY") == "all"


def make_run(model: str, layout: dict[str, Any], precision: str, micro_batch: int = 1, layers: int = 4) -> Run:
    """Three SGD steps of 8 sequences."""
    return load_run(
        {
            "model": MODELS[model] | {"layers": layers},
            "cluster": {"gpu": "cpu"},
            "layout": {**layout, "micro_batch": micro_batch},
            "recipe": {
                "sequence": SEQUENCE,
                "batch_tokens": SEQUENCES * SEQUENCE,
                "steps": STEPS,
                "precision": precision,
                "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5, "clip": 1.0},
                "schedule": {"name": "constant"},
                "balance": BALANCE.get(model, {}),
            },
        }
    )


def layers_for(layout: dict[str, Any]) -> int:
    return max(4, layout.get("pp", 1) * layout.get("virtual_stages", 1))


def refusals(model: str, layout: dict[str, Any]) -> list[str]:
    """Why this model cannot be trained on this layout; empty where it can."""
    run = make_run(model, layout, "fp64", layers=layers_for(layout))
    return list(illegal(run.model, run.layout, run.recipe))


def largest_micro_batch(layout: dict[str, Any]) -> int:
    """With which a step has as few micro-batches as its schedule takes."""
    ranks = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    few = layout.get("pp", 1) * (2 if layout.get("schedule") == "dualpipev" else 1)
    return SEQUENCES // ranks // few


def train(run: Run) -> Trained:
    return train_few_steps(run, torch.device("cpu"))


@cache
def reference(ranks, model: str, precision: str, layers: int = 4) -> Trained:
    """The same on one process, in one micro-batch."""
    return ranks(1).run(train, make_run(model, {}, precision, SEQUENCES, layers))[0]


def compare(run: Run, expected: Trained) -> dict[str, float]:
    return differences(train(run), expected)


def numbers(run: Run, expected: Trained) -> dict[str, Any]:
    """What else a rank found, to look at."""
    result = train(run)
    moved = max(float((local(result.final[name]) - local(old)).abs().sum()) for name, old in result.initial.items())
    return {
        "initial weights": differences(result, expected)["initial weights"],
        "losses": result.losses,
        "norms": result.norms,
        "scales": result.scales,
        "moved": moved,
    }


def failures(found: list[dict[str, float]], precision: str) -> list[str]:
    """What differs on any rank by more than rounding, of what `compare` returned on each."""
    return [
        f"rank {rank}: {quantity} differs by {difference:.3g}"
        for rank, quantities in enumerate(found)
        for quantity, difference in quantities.items()
        if difference > (0 if quantity in EXACT else TOLERANCE[precision])
    ]
