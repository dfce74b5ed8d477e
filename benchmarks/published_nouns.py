"""What a published row names, as the planner's nouns: chip, model, software, precision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.planner.stacks import STACKS, Stack
from shardwise.spec import Gpu, InputError, Model
from shardwise.spec.presets import gpu_preset

Row = dict[str, Any]

_GPUS = (  # first match wins
    (r"A100.*40", "a100-40-sxm"),
    (r"A100.*PCI", "a100-80-pcie"),
    (r"A100", "a100-80-sxm"),
    (r"H100.*PCI", "h100-pcie"),
    (r"H100", "h100-sxm"),
    (r"H200", "h200-sxm"),
    (r"GB300", "gb300-nvl72"),
    (r"GB200", "gb200-nvl72"),
    (r"B300", "b300-sxm"),
    (r"B200", "b200-sxm"),
    (r"MI300X", "mi300x"),
    (r"L40S", "l40s"),
    (r"\bL4\b", "l4"),
    (r"A10G", "a10g"),
)


_STACKS = (
    ("torchtitan", "torchtitan"),
    ("fsdp", "fsdp1"),
    ("deepspeed", "deepspeed"),
    ("nemo", "megatron"),
    ("megatron", "megatron"),
)
_OVERLAPPED = 0.8  # share of the all-to-all that another micro-batch's compute hides


class Unusable(ValueError):
    """Why a row cannot be predicted or compared."""


def gpu_of(row: Row) -> Gpu:
    name = row["hardware"]["gpu"] or "not stated"
    preset = next((preset for pattern, preset in _GPUS if re.search(pattern, name)), None)
    if preset is None:
        raise Unusable(f"hardware {name}")
    gpu = gpu_preset(preset)
    gpu = _with_stated_network(gpu, row["hardware"])
    if "500W" in name or "low TDP" in name:  # an H100 with HBM2e (2.4 TB/s) and less power
        bandwidth = gpu.bandwidth_tb_s.model_copy(update={"value": 2.4})  # type: ignore[union-attr]
        memory = gpu.memory_gb.model_copy(update={"value": 96.0})  # type: ignore[union-attr]
        gpu = gpu.model_copy(update={"name": "h100-500w", "bandwidth_tb_s": bandwidth, "memory_gb": memory})
    return gpu


def _with_stated_network(gpu: Gpu, hardware: Row) -> Gpu:
    """The chip with its network scaled to what the row states, such as "1600 Gbps/node" or "400 Gb/s per GPU"."""
    text = hardware.get("inter_bw") or ""
    found = re.search(r"(?:(\d+)x \D*)?(\d+) ?(T|G)b(?:/s|ps)", text)
    usual = re.search(r"nic-(\d+)g", gpu.inter.name) if gpu.inter else None
    if not found or not usual or gpu.inter is None:
        return gpu
    gigabits: float = int(found[1] or 1) * int(found[2]) * (1000 if found[3] == "T" else 1)
    if re.search(r"node|host", text):
        gigabits /= hardware.get("gpus_per_node") or gpu.node
    share = gigabits / int(usual[1])
    curve = tuple((size, rate * share) for size, rate in gpu.inter.curve)
    return gpu.model_copy(update={"inter": gpu.inter.model_copy(update={"curve": curve, "reduce_curve": ()})})


def model_of(row: Row) -> Model:
    model = row["model"]
    heads = int(model["heads"])
    data: dict[str, Any] = {
        "name": model["name"],
        "layers": int(model["layers"]),
        "hidden": int(model["hidden"]),
        "heads": heads,
        "kv_heads": int(model.get("kv_heads") or heads),
        "head_dim": int(model.get("head_dim") or model["hidden"] // heads),
        "ffn": int(model["ffn"]),
        "vocabulary": int(model.get("vocab") or 51200),
        "max_sequence": int(model["seq"]),
        "activation": "swiglu" if model.get("gated_mlp") else "gelu",
        "tied": bool(model.get("tied")),
    }
    if model.get("experts"):
        if model.get("topk") is None:
            raise Unusable("topk not stated")
        data["experts"] = {
            "count": int(model["experts"]),
            "top_k": int(model["topk"]),
            "ffn": int(model.get("moe_ffn") or model["ffn"]),
            "shared_ffn": int(model.get("shared_expert_ffn") or 0),
            "dense_layers": int(model.get("dense_layers") or 0),
        }
    if model.get("mla"):
        mla = model["mla"]
        if lacking := [key for key in ("kv_lora", "qk_nope", "qk_rope", "v") if not mla.get(key)]:
            raise Unusable(f"mla.{lacking[0]} not stated")
        data["latent"] = {
            "query_rank": int(mla.get("q_lora") or 0),
            "kv_rank": int(mla["kv_lora"]),
            "nope_dim": int(mla["qk_nope"]),
            "rope_dim": int(mla["qk_rope"]),
            "value_dim": int(mla["v"]),
        }
    try:
        return Model.load(data, "model")
    except InputError as error:
        raise Unusable(f"model: {error}") from None


def stack_of(layout: Row, stacks: Mapping[str, Stack] = STACKS) -> Stack:
    """The software's constants, with what a row says of it: CUDA graphs, hidden all-to-all."""
    framework = layout["framework"] or ""
    name = next((stack for part, stack in _STACKS if part in framework.lower()), None)
    if name is None:
        raise Unusable(f"framework {framework or 'not stated'}")
    stack, other = stacks[name], str(layout.get("other") or "")
    graphs = found[1] if (found := re.search(r"cuda_graph=([^;]*)", other)) else ""
    if "full_iteration" in graphs:
        stack = replace(stack, layer_overhead_seconds=0.0, expert_overhead_seconds=0.0)
    elif "attn" in graphs or "moe_router" in graphs:  # the experts themselves stay outside the graph
        stack = replace(stack, layer_overhead_seconds=0.0)
    if "moe_a2a_overlap=True" in other:
        stack = replace(stack, hides_expert=max(stack.hides_expert, _OVERLAPPED))
    return stack


def dtype_of(precision: str) -> str:
    name = precision.lower()
    if "fp4" in name:
        return "fp4"
    if "rowwise" in name:
        return "fp8-rowwise"
    return "fp8" if "fp8" in name or "float8" in name else "bf16"
