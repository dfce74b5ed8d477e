"""The parity matrix: every layout trains the same model as one process.

Initial weights are bit-equal; loss, gradient norm and weights after three SGD steps agree to rounding. SGD, because
AdamW turns a difference of 1e-7 in a gradient into one of 1e-4 in a weight.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.data import Order
from shardwise.parallel.apply import build_parallel
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.module import ParallelModule
from shardwise.spec import Run, load_run
from shardwise.spec.legality import illegal, untrainable
from shardwise.training import loss_scale
from shardwise.training.batches import Batches
from shardwise.training.loop import Trainer

STEPS, SEQUENCES, SEQUENCE = 3, 8, 16
LAYOUTS = {
    "one process": {},
    "one process, FSDP": {"zero": 3},
    "DDP×2": {"dp_replicate": 2},
    "DDP×4": {"dp_replicate": 4},
    "FSDP×2, zero 2": {"dp_shard": 2, "zero": 2},
    "FSDP×2, zero 3": {"dp_shard": 2, "zero": 3},
    "FSDP×4, zero 2": {"dp_shard": 4, "zero": 2},
    "FSDP×4, zero 3": {"dp_shard": 4, "zero": 3},
    "HSDP 2×2, zero 2": {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
    "HSDP 2×2, zero 3": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "TP×2": {"tp": 2},
    "TP×4": {"tp": 4},
    "TP×2, chunked loss": {"tp": 2, "loss": "chunked"},
    "chunked loss": {"loss": "chunked"},
    "DDP×2 × TP×2": {"dp_replicate": 2, "tp": 2},
    "FSDP×2 × TP×2": {"dp_shard": 2, "tp": 2},
    "HSDP 2×2 × TP×2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "EP×2, zero 3": {"dp_shard": 2, "ep": 2},
    "EP×2, zero 2": {"dp_shard": 4, "ep": 2, "zero": 2},
    "EP×4, zero 3": {"dp_shard": 4, "ep": 4},
    "EP×2 × FSDP×2, zero 3": {"dp_shard": 4, "ep": 2},
    "EP×2 × HSDP 2×2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "EP×2 over TP×2": {"tp": 2, "ep": 2},
    "EP×2 over CP×2": {"cp": 2, "ep": 2},
    "EP×4 over FSDP×2 × TP×2": {"dp_shard": 2, "tp": 2, "ep": 4},
    "EP×2 in FSDP×2 × TP×2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "CP×2, all-gather": {"cp": 2},
    "CP×2, ring": {"cp": 2, "cp_method": "ring"},
    "CP×2, Ulysses": {"cp": 2, "cp_method": "ulysses"},
    "CP×4, all-gather": {"cp": 4},
    "CP×4, ring": {"cp": 4, "cp_method": "ring"},
    "CP×4, Ulysses": {"cp": 4, "cp_method": "ulysses"},
    "CP×2, chunked loss": {"cp": 2, "loss": "chunked"},
    "CP×2, zero 3": {"cp": 2, "zero": 3},
    "FSDP×2 × CP×2, zero 2": {"dp_shard": 2, "cp": 2, "zero": 2},
    "FSDP×2 × CP×2, zero 3": {"dp_shard": 2, "cp": 2, "zero": 3},
    "DDP×2 × CP×2": {"dp_replicate": 2, "cp": 2},
    "CP×2 × TP×2, all-gather": {"cp": 2, "tp": 2},
    "CP×2 × TP×2, ring": {"cp": 2, "cp_method": "ring", "tp": 2},
    "CP×2 × TP×2, Ulysses": {"cp": 2, "cp_method": "ulysses", "tp": 2},
    "HSDP 2×2 × CP×2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    "PP×2, gpipe": {"pp": 2, "schedule": "gpipe"},
    "PP×2, 1f1b": {"pp": 2},
    "PP×2, interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "PP×2, interleaved-zb": {"pp": 2, "schedule": "interleaved-zb", "virtual_stages": 2},
    "PP×2, zbv": {"pp": 2, "schedule": "zbv", "virtual_stages": 2},
    "PP×2, dualpipev": {"pp": 2, "schedule": "dualpipev", "virtual_stages": 2},
    "PP×2, chunked loss": {"pp": 2, "loss": "chunked"},
    "PP×4, gpipe": {"pp": 4, "schedule": "gpipe"},
    "PP×4, 1f1b": {"pp": 4},
    "PP×4, interleaved": {"pp": 4, "schedule": "interleaved", "virtual_stages": 2},
    "PP×4, interleaved-zb": {"pp": 4, "schedule": "interleaved-zb", "virtual_stages": 2},
    "PP×4, zbv": {"pp": 4, "schedule": "zbv", "virtual_stages": 2},
    "PP×4, dualpipev": {"pp": 4, "schedule": "dualpipev", "virtual_stages": 2},
    "PP×2 × DDP×2": {"pp": 2, "dp_replicate": 2},
    "PP×2 × FSDP×2, zero 2": {"pp": 2, "dp_shard": 2, "zero": 2},
    "PP×2 × FSDP×2, zero 3": {"pp": 2, "dp_shard": 2, "zero": 3},
    "PP×2 × FSDP×2, interleaved": {"pp": 2, "dp_shard": 2, "schedule": "interleaved", "virtual_stages": 2},
    "PP×2 × FSDP×2, zbv": {"pp": 2, "dp_shard": 2, "zero": 2, "schedule": "zbv", "virtual_stages": 2},
    "PP×2 × HSDP 2×2": {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
    "PP×2 × TP×2": {"pp": 2, "tp": 2},
    "PP×2 × TP×2, zbv": {"pp": 2, "tp": 2, "schedule": "zbv", "virtual_stages": 2},
    "PP×2 × CP×2": {"pp": 2, "cp": 2},
    "PP×2 × FSDP×2 × TP×2": {"pp": 2, "dp_shard": 2, "tp": 2},
}
MODELS = {  # sizes that shards of 4 ranks do not divide; for tp 4 the llama has fewer KV heads than ranks
    "gpt": {"preset": "tiny-gpt", "layers": 4, "hidden": 36, "ffn": 52, "heads": 4, "kv_heads": 4, "head_dim": 9,
            "vocabulary": 68, "max_sequence": 32},
    "llama": {"preset": "tiny-llama", "layers": 4, "hidden": 36, "ffn": 52, "heads": 8, "kv_heads": 2, "head_dim": 6,
              "vocabulary": 68, "tied": False, "qk_norm": True},
    "qwen-moe": {"preset": "tiny-moe", "layers": 2, "hidden": 36, "heads": 4, "kv_heads": 2, "head_dim": 10, "ffn": 52,
                 "vocabulary": 68, "qk_norm": True, "experts": {"count": 8, "top_k": 3, "ffn": 12}},
    "deepseek": {"preset": "tiny-moe", "layers": 2, "hidden": 36, "heads": 4, "ffn": 52, "vocabulary": 68,
                 "tied": False,
                 "latent": {"query_rank": 10, "kv_rank": 9, "nope_dim": 6, "rope_dim": 4, "value_dim": 5},
                 "experts": {"count": 8, "top_k": 3, "ffn": 12, "shared_ffn": 20, "dense_layers": 1,
                             "router": "sigmoid", "router_bias": True, "groups": 4, "top_groups": 2, "scale": 1.5}},
}  # fmt: skip
for name in ("gpt", "llama"):
    MODELS[f"deep {name}"] = MODELS[name] | {"layers": 8}
BALANCE = {"qwen-moe": {"auxiliary": 0.1}, "deepseek": {"auxiliary": 0.1, "bias_rate": 0.01}}
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}


class Stream:
    """Tokens in memory. Their number leaves the last window partial, so ranks see unequal numbers of targets."""

    def __init__(self, vocabulary: int):
        self._ids = np.random.default_rng(0).integers(vocabulary, size=SEQUENCES * STEPS * SEQUENCE - 9)
        self.tokens = len(self._ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]


@dataclass
class Result:
    initial: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]
    final: dict[str, torch.Tensor]
    scales: list[float | None]


def make_run(model: str, layout: dict, precision: str, micro_batch: int) -> Run:
    return load_run(
        {
            "model": MODELS[model],
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


def full_weights(module: ParallelModule) -> dict[str, torch.Tensor]:
    """The whole weights and buffers, by name, on every rank."""
    tensors = [*module.named_buffers(), *module.named_parameters()]
    own = {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors}
    parts: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: tensor for part in parts for name, tensor in part.items()}


def train(run: Run) -> Result:
    device = torch.device("cpu")
    mesh = build_mesh(run.layout, "cpu")
    module = build_parallel(run, mesh, device)
    initial = full_weights(module)
    stream = Stream(run.model.vocabulary)
    order = Order(stream.tokens, SEQUENCE, SEQUENCES, run.recipe.seed)
    batches = Batches(stream, order, run.layout, mesh.data_rank, run.model.vocabulary, device)
    steps = list(Trainer(run, module, wants_stop=lambda: False).steps(batches, order, 0))
    batches.close()
    final = full_weights(module)
    return Result(initial, [s.loss for s in steps], [s.grad_norm for s in steps], final, [s.loss_scale for s in steps])


@cache
def _reference(ranks, model: str, precision: str) -> Result:
    return ranks(1).run(train, make_run(model, {}, precision, SEQUENCES))[0]


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def allowed(model: str, layout: str) -> bool:
    run = make_run(model, LAYOUTS[layout], "fp64", 1)
    if model.startswith("deep ") != (run.layout.pp * run.layout.virtual_stages > 4):
        return False
    return not [*illegal(run.model, run.layout, run.recipe), *untrainable(run.model, run.layout)]


CASES = [pytest.param(model, layout, id=f"{layout}-{model}") for layout in LAYOUTS for model in MODELS
         if allowed(model, layout)]  # fmt: skip


def test_every_layout_trains_some_model():
    assert {case.values[1] for case in CASES} == LAYOUTS.keys()


@pytest.mark.parametrize("accumulate", [False, True], ids=["few micro-batches", "accumulated"])
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layout_trains_the_same_model(ranks, layout, model, precision, accumulate):
    degrees = LAYOUTS[layout]
    data_ranks = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    few = degrees.get("pp", 1) * (2 if degrees.get("schedule") == "dualpipev" else 1)  # micro-batches
    micro_batch = 1 if accumulate else SEQUENCES // data_ranks // few
    run = make_run(model, degrees, precision, micro_batch)
    reference = _reference(ranks, model, precision)
    results = ranks(run.layout.world).run(train, run)
    for result in results:
        assert largest_difference(result.initial, reference.initial) == 0
        assert result.losses == results[0].losses
        assert result.losses == pytest.approx(reference.losses, abs=TOLERANCE[precision])
        assert result.norms == pytest.approx(reference.norms, abs=TOLERANCE[precision])
        assert largest_difference(result.final, reference.final) <= TOLERANCE[precision]
    assert largest_difference(results[0].final, results[0].initial) > 1e-3


@pytest.mark.parametrize("layout", ["one process, FSDP", "DDP×2", "FSDP×2, zero 3", "HSDP 2×2, zero 2"])
def test_bf16_is_the_same_arithmetic_on_every_layout(ranks, layout):
    """Weights are cast where they are used: what differs is rounding of bf16 sums, not the recipe."""
    run = make_run("llama", LAYOUTS[layout], "bf16", 1)
    reference = _reference(ranks, "llama", "bf16")
    result = ranks(run.layout.world).run(train, run)[0]
    assert largest_difference(result.initial, reference.initial) == 0
    assert result.losses == pytest.approx(reference.losses, rel=2e-3)
    assert result.norms == pytest.approx(reference.norms, rel=2e-2)
    exact = _reference(ranks, "llama", "fp64")
    assert result.losses == pytest.approx(exact.losses, rel=5e-3)


def train_with_scale(run: Run, first_scale: float) -> tuple[Result, list[float]]:
    before, loss_scale._FIRST = loss_scale._FIRST, first_scale
    try:
        result = train(run)
    finally:
        loss_scale._FIRST = before
    return result, result.scales


@pytest.mark.parametrize("layout", ["one process, FSDP", "DDP×2", "FSDP×2, zero 3", "HSDP 2×2, zero 2"])
def test_fp16_with_loss_scale_is_the_same_on_every_layout(ranks, layout):
    run = make_run("llama", LAYOUTS[layout], "fp16", 1)
    reference = _reference(ranks, "llama", "fp16")
    result = ranks(run.layout.world).run(train, run)[0]
    exact = _reference(ranks, "llama", "fp64")
    assert result.losses == pytest.approx(reference.losses, rel=5e-4)
    assert result.norms == pytest.approx(reference.norms, rel=5e-3)
    assert result.losses == pytest.approx(exact.losses, rel=1e-3)
    assert result.scales == [2.0**16] * STEPS


@pytest.mark.parametrize("layout", ["one process", "DDP×2", "FSDP×4, zero 3", "HSDP 2×2, zero 3"])
def test_fp16_overflow_skips_the_update_on_every_rank(ranks, layout):
    """At first the scale is far too high: nothing changes but the scale, on all ranks alike."""
    run = make_run("llama", LAYOUTS[layout], "fp16", 1)
    for result, scales in ranks(run.layout.world).run(train_with_scale, run, 2.0**60):
        assert scales == [2.0**60, 2.0**59, 2.0**58]
        assert result.norms == [None] * STEPS
        assert largest_difference(result.final, result.initial) == 0
