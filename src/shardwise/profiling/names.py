"""What a kernel, a collective or an annotation is, from its name. Whoever writes kernels names them as he likes, so
these are patterns of the names that cuBLAS, CUTLASS, cuDNN, FlashAttention, Triton, NCCL, RCCL and DeepEP use."""

from __future__ import annotations

import re

from shardwise.profiling.trace import ATTENTION, COMMUNICATION, COPY, GEMM, MEMORY

_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|deep_ep|multimem|(one|two)_shot_all_reduce|all_?reduce_kernel|all_?gather_kernel|msccl", re.I
)
_ATTENTION = re.compile(r"flash_?(fwd|bwd|attn)|fmha|flash::|sdpa|attention|flex_attn|mha_(fwd|bwd)", re.I)
_GEMM = re.compile(
    r"gemm|cutlass|cublas|xmma|nvjet|wgmma|hgmma|s\d+816|h884|s884|\bconv|convolve|_mm_|triton_\w*mm\b|grouped_mm|"
    r"cijk_|splitk(?!reduce)",
    re.I,
)
_COPY = re.compile(r"memcpy|\[cuda memcpy", re.I)
_ON_DEVICE = re.compile(r"dtod|device -> device|device-to-device", re.I)

_COLLECTIVES = (
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather"),
    ("all_reduce", r"all_?reduce|multimem"),
    ("all_to_all", r"all_?to_?all|alltoall|deep_ep|dispatch|combine"),
    ("send_recv", r"send|recv"),
    ("broadcast", r"broadcast|scatter|gather"),
)

# Groups as torch's device meshes (mesh_tp), Megatron (TENSOR_MODEL_PARALLEL_GROUP) and DeepSpeed name them.
_GROUPS = (
    ("expert", r"(^|[_ ])(ep|etp|expert\w*)([_ ]|$)"),
    ("context", r"(^|[_ ])(cp|context\w*|sp)([_ ]|$)"),
    ("tensor", r"(^|[_ ])(tp|tensor\w*)([_ ]|$)"),
    ("pipeline", r"(^|[_ ])(pp|pipe\w*)([_ ]|$)"),
    ("", r"(^|[_ ])(dp|fsdp|shard|replicate|data\w*)([_ ]|$)"),  # by its collective
)
_STREAMS = {"all_gather": "all_gather", "all_to_all": "expert", "send_recv": "pipeline"}  # else reduce_scatter

INPUT = r"dataloader|^shardwise: input$|next_batch|get_batch|data_?load|load_batch|fetch_data"
CHECKPOINT = (
    r"(save|write|stage)\w*[ _.:]*(checkpoint|state_?dict)|checkpoint\w*[ _.:]*(save|write)|dcp[ _.:]*(async_)?save|"
    r"torch\.save|^shardwise: save$"
)
COMPILATION = r"dynamo_timed|compile_inner|compile_fx|backend_compile|^shardwise: compile$"
COMPILED = r"^_compile\.compile_inner"  # once per graph
OPTIMIZER = r"^optimizer\.step|^shardwise: optimizer$|optimizer[ _.]step"
# What FSDP2 does around a collective: parameters into one buffer and out of it. Nothing fuses with it.
PACKING = r"^fsdp::|split_with_sizes_copy|chunk_cat|all_gather_copy"
STEP = r"^(ProfilerStep#\d+|((train(ing)?)?[ _]*(step|iter(ation)?))[ _#:=]*\d+)$"
WAITS = re.compile(r"synchronize", re.I)  # calls of the driver that return when the device is done


def kernel_kind(name: str) -> int:
    """One of trace.KINDS, by index. Copies within the device move memory as kernels do."""
    if _COMMUNICATION.search(name):
        return COMMUNICATION
    if _COPY.search(name):
        return MEMORY if _ON_DEVICE.search(name) else COPY
    if _ATTENTION.search(name):
        return ATTENTION
    return GEMM if _GEMM.search(name) else MEMORY


_CPU_GEMM = re.compile(r"::(_?addmm|mm|bmm|baddbmm|linear|_grouped_mm|mkldnn_\w*linear\w*|matmul|conv\w*)$")
_CPU_ATTENTION = re.compile(r"scaled_dot_product")


def operator_kind(name: str) -> int:
    """Of an operator on a CPU."""
    if _CPU_ATTENTION.search(name):
        return ATTENTION
    return GEMM if _CPU_GEMM.search(name) else MEMORY


def collective_of(name: str) -> str:
    """The collective that a kernel's or operator's name speaks of."""
    for collective, pattern in _COLLECTIVES:
        if re.search(pattern, name, re.I):
            return collective
    return "other"


def stream_of(collective: str, group: str) -> str:
    """The Timeline's stream for a collective in a group that is called `group` ('' where nobody says)."""
    for stream, pattern in _GROUPS:
        if group and re.search(pattern, group, re.I):
            return stream or ("all_gather" if collective == "all_gather" else "reduce_scatter")
    return _STREAMS.get(collective, "reduce_scatter")
