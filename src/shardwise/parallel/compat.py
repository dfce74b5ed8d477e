"""The only place that reaches into PyTorch's private parts, and that knows 2.11 from 2.13."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


class LeanStage(PipelineStage):
    """A PipelineStage whose buffers for what it receives exist only while they are needed. PyTorch's has those of every
    micro-batch of a step, from the first step on: 2 · micro-batches · (micro_batch, S, hidden).

    The infrastructure is prepared on the meta device, and each buffer is allocated by its receive.
    """

    def _prepare_forward_infra(self, *arguments: Any, **named: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*arguments, **named)

    def _prepare_backward_infra(self, *arguments: Any, **named: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*arguments, **named)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        _replace(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        _replace(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        for received in (self.args_recv_info, self.grad_recv_info):
            _replace(received[bwd_chunk_id], torch.device("meta"))

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # 2.11 greets neighbours on the same rank (zbv, dualpipev), too, for which gloo waits forever.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


def _replace(infos: Iterable[Any], device: torch.device) -> None:
    """New buffers in the place of the old; what the pipeline itself is given has none."""
    for info in infos:
        old = getattr(info, "buffer", None)
        if old is not None:
            info.buffer = torch.empty_like(old, device=device, requires_grad=old.requires_grad)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 on CUDA, in bf16 or fp16, with gradients: q (B, H, Sq, d), k, v (B, G, Sk, d) -> (B, H, Sq, d),
    and the log-sum-exp of the scores, (B, H, Sq) fp32, which has no gradient. The causal mask is aligned at the bottom
    right. d is a multiple of 8, at most 256."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    return out, lse


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `flash_attention`, given its results or those over more keys than these."""
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, random, random[:0], scale=scale
    )


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """As `flash_attention`, without grouped queries, on the CPU, in any type; the log-sum-exp in at least fp32."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `flash_attention_backward`, on the CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


def enable_async_tp(group: dist.ProcessGroup) -> None:
    """Let inductor overlap products with the collectives of this group, by symmetric memory. CUDA only."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """The same part of the same tensor, held in `local`, which may lie on another device than the mesh's: FSDP2 makes
    its offloaded parameters so."""
    return DTensor(local, tensor._spec, requires_grad=False)


def buffers_stay() -> dict[str, bool]:
    """DistributedDataParallel's way not to broadcast buffers before each forward: 2.13 has another name for it."""
    signature = inspect.signature(DistributedDataParallel.__init__)
    return {("forward_sync_buffers" if "forward_sync_buffers" in signature.parameters else "broadcast_buffers"): False}
