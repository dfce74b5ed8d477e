"""The only place that reaches into PyTorch's private parts, and that knows 2.11 from 2.13."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

# Whether a pipeline can split the backward of operators written in Python: 2.11 loses their nodes in between.
SPLITS_CUSTOM_OPERATORS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


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


def all_gather(output: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's own tensor, one after the other, into the output. 2.13 has renamed it."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(output, own, group=group)


# What a rehearsal needs.


def fake_process_group(rank: int, world: int) -> None:
    """This process as one rank of a world of which there is nobody else. Nothing is exchanged; an all-gather copies
    what is this rank's own to everyone's place, and other collectives leave outputs as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


@contextmanager
def gathers_without_copies(*, eager: bool = True) -> Iterator[None]:
    """In a fake process group: all-gathers do not even copy what is this rank's to everyone's place, a launch for each.
    FSDP2's buffers keep what earlier ones left there."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def empty(x: Tensor, size: int, *_: Any) -> Tensor:
        return x.new_empty(size * len(x), *x.shape[1:])

    with ExitStack() as stack:
        if eager:
            functional = torch.ops._c10d_functional
            stack.enter_context(mock.patch.object(functional, "all_gather_into_tensor", empty))
        for name in ("all_gather_into_tensor", "all_gather_single"):  # torch 2.11, 2.13
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, nothing))
        yield


@contextmanager
def around_shape_propagation(inside: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `inside()` wherever DTensor runs an operator on global shapes, to see what comes out."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    with ExitStack() as stack:
        for name in ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"):
            if (method := getattr(ShardingPropagator, name, None)) is not None:
                stack.enter_context(mock.patch.object(ShardingPropagator, name, _within(method, lambda *_: inside())))
        yield


@contextmanager
def around_fsdp(inside: Callable[[str, Iterable[Tensor]], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `inside(action, tensors)` wherever FSDP2 works: "gather" (on its own stream), "unshard", "reduce", and
    "accumulate" with the unsharded gradient that waits for its reduction, known once that is over."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def waiting(parameter: FSDPParam) -> Iterator[Tensor]:
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None:
            gradient = parameter._unsharded_param.grad
        if gradient is not None:
            yield gradient

    group = _fsdp_param_group.FSDPParamGroup
    actions = [
        (_fsdp_param_group, "foreach_all_gather", "gather"),
        (group, "wait_for_unshard", "unshard"),
        (_fsdp_param_group, "foreach_reduce", "reduce"),
    ]
    with ExitStack() as stack:
        for owner, name, action in actions:
            wrapped = _within(getattr(owner, name), lambda *_, action=action: inside(action, ()))
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        wrapped = _within(FSDPParam.to_accumulated_grad_if_needed, lambda one: inside("accumulate", waiting(one)))
        stack.enter_context(mock.patch.object(FSDPParam, "to_accumulated_grad_if_needed", wrapped))
        yield


def _within(function: Callable[..., Any], context: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        with context(*arguments):
            return function(*arguments, **named)

    return call


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """While torch.compile works with `inductor_graphs`: nothing that it makes can be kept on disk, and shapes are never
    generalized."""
    import torch._dynamo.config
    import torch._functorch.config

    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(automatic_dynamic_shapes=False),
    ):
        yield


def inductor_graphs(runner: Callable[[torch.fx.GraphModule], Callable[[list[Any]], Any]]) -> Callable[..., Any]:
    """A backend of torch.compile that does what Inductor does up to the graphs of forward and backward: their order and
    what is saved are its choice. runner(graph): what runs one, given a list of inputs that it empties."""
    from torch._inductor.compile_fx import compile_fx

    def inner(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Callable[[list[Any]], Any]:
        return runner(graph)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(graph, inputs, inner_compile=inner)

    return backend


@contextmanager
def pipeline_without_votes() -> Iterator[None]:
    """2.13's stages vote on how shapes are found, and read the result, which a fake tensor does not have. Ours are
    given theirs."""
    from torch.distributed.pipelining import _utils, schedules

    mode = getattr(_utils, "InferenceMode", None)
    base = schedules._PipelineSchedule
    if mode is None or not hasattr(base, "_warmup_p2p"):
        yield
        return

    def warm_up(schedule: Any, stages: Iterable[Any], *_: Any, **__: Any) -> None:
        for stage in stages:
            stage._inference_mode = mode.STATIC

    with mock.patch.object(base, "_warmup_p2p", warm_up):
        yield


def compilations() -> list[tuple[str, str, float, float]]:
    """What torch.compile has compiled in this process so far: function, why again ('' the first time), seconds since
    the epoch at which it began, seconds that it took."""
    from torch._dynamo.utils import get_compilation_metrics

    found = []
    for item in get_compilation_metrics():
        name = f"{getattr(item, 'co_name', None) or 'a graph'}"
        began = getattr(item, "start_time", None) or (getattr(item, "start_time_us", None) or 0) / 1e6
        seconds = (getattr(item, "duration_us", None) or 0) / 1e6 or getattr(item, "entire_frame_compile_time_s", 0.0)
        found.append((name, getattr(item, "recompile_reason", None) or "", float(began), float(seconds or 0.0)))
    return found
