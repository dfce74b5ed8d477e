"""A published run (a row of the schema in ../shared/data/README.md) as the planner's Subject: everything but what the
row measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.published_nouns import Row, Unusable, dtype_of, gpu_of, model_of, stack_of

from shardwise.planner.memory import predict_memory, verdict
from shardwise.planner.recompute import NONE, Recompute
from shardwise.planner.recompute import recompute_of as policy
from shardwise.planner.step import predict_step
from shardwise.planner.subject import Subject
from shardwise.planner.work import attention_work, block_work
from shardwise.spec import Cluster, Gpu, InputError, Layout, Model

CALIBRATION = ("bloom", "dgxc", "llmfoundry", "mbridge", "titan")
"""Sources that the stacks' constants are fitted to (`benchmarks/fit_stacks.py`); all others are held out."""


def source_of(row: Row) -> str:
    return str(row["id"].split("-")[0])


def subject_of(row: Row) -> Subject:
    """The row as a Subject, from everything but its measurement. Micro-batch and virtual stages that it leaves open are
    those that the planner would choose: the fastest predicted that fits. Raises Unusable."""
    _require(row["model"], "layers", "hidden", "ffn", "heads", "seq")
    _require(row["hardware"], "gpus")
    _require(row["layout"], "tp", "pp", "global_batch")
    subjects, reason = [], Unusable("")
    for layout in _open_choices(row):
        try:
            subjects.append(_subject({**row, "layout": layout}))
        except Unusable as error:
            reason = error
    if not subjects:
        raise reason
    if len(subjects) == 1:
        return subjects[0]
    fitting = [subject for subject in subjects if verdict(predict_memory(subject), subject.cluster.gpu) != "oom"]
    return min(fitting or subjects[:1], key=lambda subject: predict_step(subject).seconds)


def _open_choices(row: Row) -> list[Row]:
    """The row's layout with each micro-batch and number of virtual stages that it may mean."""
    layout = row["layout"]
    chunks, virtual = int(row["model"]["layers"] // layout["pp"]), [layout.get("vpp")]
    megatron = "megatron" in (layout["framework"] or "").lower() and "deepspeed" not in layout["framework"].lower()
    if megatron and layout["pp"] > 1 and not layout.get("vpp") and not layout.get("schedule"):
        virtual = [count for count in range(1, chunks + 1) if chunks % count == 0]
    stated = layout.get("micro_batch") or "local batch" in str(layout.get("other") or "")
    batches = [layout.get("micro_batch")] if stated else [1, 2, 4, 8]
    return [{**layout, "vpp": chosen, "micro_batch": batch} for chosen in virtual for batch in batches]


def _subject(row: Row) -> Subject:
    model, layout, gpu = model_of(row), row["layout"], gpu_of(row)
    stack, dtype = stack_of(layout), dtype_of(layout["precision"] or "bf16")
    chosen, micro_batches = _layout_of(row, gpu)
    try:
        stack.speed(gpu, dtype)
    except InputError as error:
        raise Unusable(str(error)) from None
    return Subject(
        model=model,
        layout=chosen,
        cluster=Cluster.model_construct(gpu=gpu, gpus=int(row["hardware"]["gpus"]), gpus_per_node=gpu.node),
        stack=stack,
        sequence=int(row["model"]["seq"]),
        micro_batches=micro_batches,
        dtype=dtype,
        recompute=recompute_of(layout.get("recompute"), model, chosen, int(row["model"]["seq"])),
        sequence_parallel=bool(layout["sp"]) if layout.get("sp") is not None else chosen.tp > 1,
        gradient_bytes=_gradient_bytes(layout),
        gather_bytes=1.0 if "fp8 all-gather" in (layout.get("fsdp") or "") else 2.0,
    )


def _require(part: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if part.get(key) is None:
            raise Unusable(f"{'number of GPUs' if key == 'gpus' else key} not stated")


def _gradient_bytes(layout: Row) -> int:
    """Of an element in the reduction: NeMo and Megatron-Bridge reduce bf16 gradients, fp16 training fp16 ones."""
    framework, precision = (layout["framework"] or "").lower(), (layout["precision"] or "").lower()
    return 2 if "nemo" in framework or precision.startswith("fp16") else 4


def _layout_of(row: Row, gpu: Gpu) -> tuple[Layout, int]:
    """Layout, and micro-batches per step and data rank."""
    layout, world = row["layout"], int(row["hardware"]["gpus"])
    tp, pp, cp, ep = (int(layout.get(key) or 1) for key in ("tp", "pp", "cp", "ep"))
    data_ranks = world // (tp * pp * cp)
    if data_ranks * tp * pp * cp != world:
        raise Unusable("degrees do not multiply to the number of GPUs")
    other, notes = str(layout.get("other") or ""), " ".join(str(layout.get(key) or "") for key in ("overlap", "other"))
    micro_batch = int(layout.get("micro_batch") or 1)
    if (local := re.match(r"local batch (\d+)", other)) and pp > 1 and not layout.get("micro_batch"):
        micro_batch = max(1, int(local[1]) // pp)  # torchtitan makes as many micro-batches as pipeline ranks
    micro_batches = layout["global_batch"] / (data_ranks * micro_batch)
    if micro_batches < 1 or micro_batches != int(micro_batches):
        raise Unusable("the batch does not divide over data ranks and micro-batches")
    zero = 1 if layout.get("zero_stage") is None else int(layout["zero_stage"])
    shards = _shard_group(str(layout.get("fsdp") or ""), data_ranks, gpu) if zero else 1
    virtual = min(int(layout.get("vpp") or 1), -(-row["model"]["layers"] // pp))
    interleaved = pp > 1 and virtual > 1 and int(micro_batches) >= pp
    try:
        chosen = Layout(
            dp_shard=shards,
            dp_replicate=data_ranks // shards,
            tp=tp,
            cp=cp,
            pp=pp,
            ep=ep,
            zero=zero,
            micro_batch=micro_batch,
            schedule="interleaved" if interleaved else "1f1b",
            virtual_stages=virtual if interleaved else 1,
            async_tp="async" in notes.lower(),
        )
    except ValueError as error:
        raise Unusable(f"layout: {' '.join(str(error).split())}") from None
    return chosen, int(micro_batches)


def _shard_group(fsdp: str, data_ranks: int, gpu: Gpu) -> int:
    """Ranks that share one copy of the weights; the groups are replicas."""
    if "HYBRID" in fsdp:
        group = gpu.node
    elif found := re.search(r"shard group (\d+)", fsdp):
        group = int(found[1])
    else:
        return data_ranks
    return group if data_ranks % group == 0 else data_ranks


def recompute_of(text: str | None, model: Model, layout: Layout, sequence: int) -> Recompute:
    """Shares of a block's forward that run twice. Megatron names modules: those with products repeat their share of
    the block's, the others (layernorm, activations) a part of its traffic."""
    name = (text or "none").lower()
    if name.startswith("full"):
        return policy("full")
    if "selective (op)" in name or "selective op" in name or "titan default" in name:
        return Recompute(gemm=0.5, attention=0.0, traffic=1.0)
    modules = set(re.findall(r"mla_up_proj|layernorm|moe_act|core_attn|mlp|moe", name))
    if not modules:
        return NONE
    tokens = layout.micro_batch * sequence / layout.cp
    block = block_work(model, layout, tokens, sequence, layer=model.layers - 1)
    attention = attention_work(model, layout, tokens, sequence)
    again = 0.0
    if ("mlp" in modules and not model.experts) or ("moe" in modules and model.experts):
        again += block.gemm_flops - attention.gemm_flops
    if "mla_up_proj" in modules and model.latent:
        again += sum(gemm.flops for gemm in attention.gemms[1:3])
    share = again / block.gemm_flops
    return Recompute(
        share, float("core_attn" in modules), min(1.0, share + 0.3 * len(modules & {"layernorm", "moe_act"}))
    )
