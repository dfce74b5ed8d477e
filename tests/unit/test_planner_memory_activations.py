"""The table of what a block keeps is what the real module keeps, to the byte."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.model.block import Block
from shardwise.model.rope import rotary_table
from shardwise.planner.memory.activations import Style, block_kept, kept_bytes
from shardwise.rehearsal.operators import cuda_operators
from shardwise.spec import Layout, Model

GPT = {"positions": "learned", "norm": "layernorm", "activation": "gelu"}
SHAPES = {
    "gpt": dict(hidden=96, heads=6, ffn=384, **GPT),
    "gpt with biases": dict(
        hidden=96, heads=6, ffn=384, **GPT, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True
    ),
    "gpt, grouped queries": dict(hidden=96, heads=6, kv_heads=2, ffn=200, **GPT),
    "llama": {"hidden": 128, "heads": 8, "ffn": 352},
    "llama, grouped queries": {"hidden": 128, "heads": 8, "kv_heads": 2, "ffn": 448},
    "llama, one key head": {"hidden": 128, "heads": 8, "kv_heads": 1, "ffn": 448},
    "qwen": {"hidden": 128, "heads": 8, "kv_heads": 2, "ffn": 448, "qk_norm": True, "head_dim": 32},
    "qwen, ungrouped": {"hidden": 128, "heads": 4, "ffn": 320, "qk_norm": True},
    "layernorm with rope and swiglu": {"hidden": 64, "heads": 4, "ffn": 160, "norm": "layernorm", "norm_bias": True},
    "rmsnorm with learned positions": {
        "hidden": 64,
        "heads": 4,
        "ffn": 256,
        "positions": "learned",
        "activation": "gelu",
    },
}
TINY = {"layers": 1, "vocabulary": 64, "max_sequence": 64}


def kept_by_module(model: Model, dtype: torch.dtype) -> float:
    """Bytes per token that autograd holds after one block's forward, weights and rotary tables apart."""
    batch, sequence = 2, 16
    with FakeTensorMode(), cuda_operators():
        torch.set_default_dtype(dtype)
        block = Block(model, 0)
        torch.set_default_dtype(torch.float32)
        x = torch.empty(batch, sequence, model.hidden, dtype=dtype, requires_grad=True)
        rope = rotary_table(model, torch.arange(sequence), sequence, dtype) if model.positions == "rope" else None
        ours = [tensor.untyped_storage() for tensor in [*block.parameters(), *(rope or ())]]
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            random_state = tensor.numel() <= 2  # flash attention's
            # A CPU's LayerNorm has statistics of the input's type; CUDA's are fp32.
            if all(storage is not other for other in ours) and not random_state:
                kept[id(storage)] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, rope)
    return sum(storage.nbytes() for storage in kept.values()) / (batch * sequence)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_table_equals_module(shape: str, dtype: torch.dtype) -> None:
    model = Model.load({**TINY, **SHAPES[shape]})
    table = block_kept(model, Layout(), Style(), moe=False, sequence=16, width=dtype.itemsize)
    narrower = 2 * 2 * (4 - dtype.itemsize) if model.norm == "layernorm" else 0
    assert kept_by_module(model, dtype) == pytest.approx(kept_bytes(table, "none") - narrower, abs=1e-9)


def test_llama3_8b_in_units_of_hidden() -> None:
    """Figures to hold against the literature: 2·D with full recompute; torchtitan's every second product 15.5·D."""
    from shardwise.planner.memory.families import FAMILIES
    from shardwise.spec.presets import model_preset

    model = model_preset("llama3-8b")

    def in_hidden(style: Style, policy: str) -> float:
        return kept_bytes(block_kept(model, Layout(), style, moe=False, sequence=8192), policy) / model.hidden

    assert in_hidden(Style(), "none") == pytest.approx(43.5, abs=0.1)
    assert in_hidden(Style(), "selective") == pytest.approx(25.0, abs=0.1)
    assert in_hidden(Style(), "full") == 2
    assert in_hidden(FAMILIES["torchtitan"].eager, "alternate") == pytest.approx(15.5, abs=0.05)


def test_tensor_parallelism_divides_what_it_can() -> None:
    model = Model.load({**TINY, **SHAPES["llama"]})

    def kept(tp: int, **options: bool) -> float:
        style = Style(gathered=options.pop("gathered", True))
        table = block_kept(model, Layout(tp=tp), style, moe=False, sequence=16, **options)
        return kept_bytes(table, "none")

    whole, residual, inputs = kept(1), 4 * model.hidden + 8, 4 * model.hidden
    assert kept(4, gathered=False) == pytest.approx(whole / 4)
    assert kept(4) == pytest.approx((whole - inputs) / 4 + inputs)
    assert kept(4, sequence_parallel=False) == pytest.approx((whole - inputs - residual) / 4 + inputs + residual)


def test_experts_scale_with_routed_tokens() -> None:
    from shardwise.planner.memory.activations import IMBALANCE

    model = Model.load({**TINY, **SHAPES["llama"], "experts": {"count": 8, "top_k": 2, "ffn": 64}})
    dense = model.model_copy(update={"experts": None, "ffn": 128})

    def kept(of: Model, ep: int = 1) -> float:
        table = block_kept(of, Layout(ep=ep), Style(), moe=of.experts is not None, sequence=16)
        return kept_bytes(table, "none")

    router, rows = 4 * 8 + 8 * 2 + 4 * (2 + 1), 2 * 2 * 2 * model.hidden  # what comes in and what goes out, two copies
    order = 2 * (8 + 8 + 4)
    assert kept(model) == kept(dense) + router + rows + order
    arrived = IMBALANCE * 2 * (2 * model.hidden + 8)  # the results, too, and the order
    routed = rows / 2 + 4 * 2 * 128
    assert kept(model, ep=4) - kept(model) == pytest.approx((IMBALANCE - 1) * routed + arrived)


EXPERTS = {"count": 8, "top_k": 2, "ffn": 64}
LATENT = {"kv_rank": 40, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
WITH_EXPERTS = {
    "softmax": {**SHAPES["llama"], "experts": EXPERTS},
    "weights that do not sum to 1": {**SHAPES["llama"], "experts": {**EXPERTS, "normalized": False}},
    "gelu, shared experts": {**SHAPES["gpt, grouped queries"], "experts": {**EXPERTS, "shared_ffn": 96}},
    "a gate on the shared experts": {
        **SHAPES["qwen"],
        "experts": {**EXPERTS, "shared_ffn": 96, "shared_gate": True},
    },
    "sigmoid with a bias and groups": {
        **SHAPES["llama"],
        "experts": {**EXPERTS, "router": "sigmoid", "router_bias": True, "groups": 4, "top_groups": 2},
    },
    "latent attention": {
        "hidden": 128,
        "heads": 8,
        "ffn": 352,
        "latent": {**LATENT, "query_rank": 48},
        "experts": {**EXPERTS, "shared_ffn": 96},
    },
    "latent keys alone": {
        "hidden": 128,
        "heads": 8,
        "ffn": 352,
        "latent": {**LATENT, "query_rank": 0},
        "experts": EXPERTS,
    },
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", WITH_EXPERTS)
def test_table_equals_module_with_experts(shape: str, dtype: torch.dtype) -> None:
    """But for the router's weight in fp32, which is none of its own type, and ends of groups of four bytes."""
    from shardwise.planner.memory.families import FAMILIES

    model = Model.load({**TINY, **WITH_EXPERTS[shape]})
    style, tokens = FAMILIES["shardwise"].eager, 2 * 16
    table = block_kept(model, Layout(), style, moe=True, sequence=16, width=dtype.itemsize)
    narrower = 2 * 2 * (4 - dtype.itemsize) if model.norm == "layernorm" else 0
    wide_router = 4 * 8 * model.hidden / tokens if dtype.itemsize < 4 else 0
    grouped = dtype == torch.bfloat16  # by one kernel, which takes the ends of groups; others take their sizes
    groups = (3 if model.activation == "swiglu" else 2) * 8 * 4 / tokens if grouped else 8 * 9 / tokens
    found = kept_by_module(model, dtype) - wide_router - groups
    assert found == pytest.approx(kept_bytes(table, "none") - narrower, abs=1e-9)
