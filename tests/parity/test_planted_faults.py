"""The parity matrix would be worth nothing if it passed on a wrong trainer. Each fault here makes it fail."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch.distributed as dist
from matrix import compare, failures, make_run, reference
from torch.distributed.fsdp import FSDPModule

from shardwise.model.decoder import Decoder
from shardwise.parallel import collectives, data
from shardwise.parallel.module import ParallelModule
from shardwise.spec import Run
from shardwise.training.batches import Batches
from shardwise.training.parity import Trained


@contextmanager
def doubled_by_ddp() -> Iterator[None]:
    original = data._sum_bucket

    def twice(group, bucket):
        bucket.buffer().mul_(2)
        return original(group, bucket)

    twice.__annotations__ = original.__annotations__
    with mock.patch.object(data, "_sum_bucket", twice):
        yield


@contextmanager
def doubled_by_fsdp() -> Iterator[None]:
    original = FSDPModule.set_gradient_divide_factor
    with mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda unit, factor: original(unit, factor / 2)):
        yield


@contextmanager
def doubled_in_the_backward_of_gathers() -> Iterator[None]:
    """What tensor parallelism gathers before a product, and context parallelism of keys and values."""
    original = collectives._Gather.backward

    def twice(ctx, grad):
        return 2 * original(ctx, grad)[0], None, None

    with mock.patch.object(collectives._Gather, "backward", staticmethod(twice)):
        yield


@contextmanager
def divided_by_the_pipeline() -> Iterator[None]:
    """As PyTorch's schedules do unless told otherwise."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    def untold(original):
        return lambda self, *arguments, **named: original(self, *arguments, **{**named, "scale_grads": True})

    with ExitStack() as stack:
        for kind in (PipelineScheduleSingle, PipelineScheduleMulti):
            stack.enter_context(mock.patch.object(kind, "__init__", untold(kind.__init__)))
        yield


@contextmanager
def experts_times_their_ranks() -> Iterator[None]:
    original = ParallelModule._reduce

    def reduce(self):
        original(self)
        for name, parameter in self.named_parameters():
            if ".experts." in name:
                parameter.grad *= self.layout.ep

    with mock.patch.object(ParallelModule, "_reduce", reduce):
        yield


@contextmanager
def a_layer_dropped() -> Iterator[None]:
    def run_blocks(self, x, rope, cache=None):
        for name, block in self.blocks.items():
            if name != "1":
                x = block(x, rope)
        return x

    with mock.patch.object(Decoder, "run_blocks", run_blocks):
        yield


@contextmanager
def labels_shifted_on_one_rank() -> Iterator[None]:
    original = Batches.take

    def take(self, index):
        batches = original(self, index)
        return [(ids, labels.roll(1, 1)) for ids, labels in batches] if dist.get_rank() == 1 else batches

    with mock.patch.object(Batches, "take", take):
        yield


@contextmanager
def norm_weights_not_synchronised() -> Iterator[None]:
    from torch.distributed.tensor import DTensor

    def cast(weight, x):
        return (weight.to_local() if isinstance(weight, DTensor) else weight).to(x.dtype)

    with mock.patch("shardwise.model.layers.cast", cast):
        yield


@contextmanager
def router_bias_by_rank() -> Iterator[None]:
    with mock.patch("shardwise.training.balance.dist.all_reduce", lambda *_, **__: None):
        yield


FAULTS = [
    (doubled_by_ddp, "llama", {"dp_replicate": 2}),
    (doubled_by_fsdp, "llama", {"dp_shard": 2}),
    (doubled_by_fsdp, "qwen-moe", {"dp_shard": 2, "ep": 2}),
    (doubled_in_the_backward_of_gathers, "llama", {"tp": 2}),
    (doubled_in_the_backward_of_gathers, "llama", {"cp": 2}),
    (divided_by_the_pipeline, "llama", {"pp": 2}),
    (divided_by_the_pipeline, "llama", {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}),
    (experts_times_their_ranks, "qwen-moe", {"dp_shard": 2, "ep": 2}),
    (a_layer_dropped, "llama", {"dp_shard": 2, "zero": 2}),
    (labels_shifted_on_one_rank, "llama", {"dp_shard": 2}),
    (labels_shifted_on_one_rank, "llama", {"pp": 2}),
    (norm_weights_not_synchronised, "llama", {"tp": 2}),
    (router_bias_by_rank, "deepseek", {"dp_shard": 2, "ep": 2}),
]


def compare_with(fault, run: Run, expected: Trained) -> dict[str, float]:
    with fault():
        return compare(run, expected)


@pytest.mark.parametrize(
    ("fault", "model", "layout"), [pytest.param(*case, id=f"{case[0].__name__}-{case[2]}") for case in FAULTS]
)
def test_the_matrix_sees_it(ranks, fault, model, layout):
    run = make_run(model, layout, "fp64", 1)
    expected = reference(ranks, model, "fp64")
    assert failures(ranks(run.layout.world).run(compare_with, fault, run, expected), "fp64")
    assert not failures(ranks(run.layout.world).run(compare, run, expected), "fp64")
