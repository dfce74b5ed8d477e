"""What the step model prices: rotary embedding, chunked loss, ZeRO-1, offloading."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.model.layers import rotate
from shardwise.planner.collectives import group_of, ring_seconds
from shardwise.planner.memory.predict import kept_of_block
from shardwise.planner.offload import updated_parameters
from shardwise.planner.recompute import recompute_of
from shardwise.planner.stacks import STACKS
from shardwise.planner.step import StepModel
from shardwise.planner.subject import Subject
from shardwise.planner.traffic import data_traffic
from shardwise.spec import Cluster, Layout
from shardwise.spec.presets import link_preset, model_preset


def subject_of(layout, gpu="h100-sxm", **options):
    layout = Layout.load(layout)
    cluster = Cluster.load({"gpu": gpu, "gpus": layout.world})
    options = {"micro_batches": 2, "recompute": recompute_of(layout.recompute), **options}
    return Subject(model_preset("llama3-8b"), layout, cluster, STACKS["shardwise"], 8192, **options)


def step_of(layout, **options):
    subject = subject_of(layout, **options)
    return StepModel(subject).predict(subject)


class Moved(TorchDispatchMode):
    """Counts bytes that operators read and write; views and the tables of cos and sin are free."""

    def __init__(self, least):
        super().__init__()
        self.bytes, self._least = 0, least

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        read, written = (
            [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)] for tree in (args, result)
        )
        places = {item.untyped_storage().data_ptr() for item in read}
        if not any(item.untyped_storage().data_ptr() in places for item in written):
            self.bytes += sum(item.nbytes for item in [*read, *written] if item.numel() >= self._least)
        return result


def test_a_rotation_moves_what_torch_moves():
    x = torch.randn(2, 64, 8, 32, dtype=torch.bfloat16, requires_grad=True)
    with Moved(x.numel() // 2) as forward:
        y = rotate(x, torch.randn(64, 16), torch.randn(64, 16))
    gradient = torch.randn_like(y)
    with Moved(x.numel() // 2) as backward:
        y.backward(gradient)
    assert (forward.bytes / x.numel(), backward.bytes / x.numel()) == STACKS["shardwise"].rotation(2)


def test_other_software_keeps_the_rotation_that_it_was_fitted_with():
    for name in ("torchtitan", "megatron", "fsdp1", "deepspeed"):
        stack = STACKS[name]
        assert stack.rotation(2) == (12 * stack.traffic, 24 * stack.traffic)


def test_a_chunked_loss_makes_the_same_products_all_in_the_forward():
    pieces = {}
    for loss in ("full", "chunked"):
        subject = subject_of({"loss": loss})
        pieces[loss] = StepModel(subject).pieces(subject)
    (forward, backward), (all_of_it, scaling) = pieces["full"].head, pieces["chunked"].head
    assert forward + backward < all_of_it < 1.5 * (forward + backward)
    assert scaling < 0.1 * backward
    assert pieces["full"].layers == pieces["chunked"].layers


def test_zero_1_reduces_and_gathers_once_a_step():
    subject = subject_of({"dp_shard": 8, "zero": 1})
    traffic = data_traffic(subject)
    assert (traffic.gather_forward, traffic.gather_backward, traffic.reduce) == (0.0, 0.0, 0.0)
    elements = 8 * updated_parameters(subject)
    gpu = subject.cluster.gpu
    group = group_of(gpu, 8, 1)
    expected = ring_seconds(gpu, group, 4 * elements) + ring_seconds(gpu, group, 2 * elements)
    assert traffic.once == pytest.approx(expected)
    # Over one step that is as much as DDP's all-reduce at most, and the optimizer's work is shared.
    ddp, zero1 = step_of({"dp_replicate": 8}), step_of({"dp_shard": 8, "zero": 1})
    assert zero1.parts["optimizer"] == pytest.approx(ddp.parts["optimizer"] / 8)


@pytest.mark.parametrize(("gpu", "link", "host"), [("h100-sxm", "pcie5", 76.8e9), ("a100-80-sxm", "pcie4", 51.2e9)])
def test_an_offloaded_optimizer_runs_on_the_host(gpu, link, host):
    layout = {"dp_shard": 8, "zero": 2}
    subject = subject_of({**layout, "offload": "optimizer"}, gpu)
    offloaded, plain = StepModel(subject).predict(subject), step_of(layout, gpu=gpu)
    updated = updated_parameters(subject)
    payload = 8 * updated  # gradients out, parameters in
    assert offloaded.parts["offload"] == pytest.approx(payload / link_preset(link).bytes_per_second(payload))
    assert offloaded.parts["optimizer"] == pytest.approx(30 * updated / host)
    added = sum(offloaded.parts[part] - plain.parts[part] for part in ("offload", "optimizer"))
    assert offloaded.seconds - plain.seconds == pytest.approx(added)


def test_offloaded_activations_cross_the_link_twice():
    layout = {"dp_shard": 8, "recompute": "selective"}
    subject = subject_of({**layout, "offload": "activations"})
    step, plain = StepModel(subject).predict(subject), step_of(layout)
    _, kept = kept_of_block(subject, 8192, moe=False)
    crossings = 2 * 2 * 32  # two micro-batches
    assert step.parts["offload"] == pytest.approx(crossings * kept / link_preset("pcie5").bytes_per_second(kept))
    assert step.seconds - plain.seconds == pytest.approx(step.parts["offload"])


def test_offloaded_parameters_come_in_for_every_gather():
    seconds = [step_of({"dp_shard": 8, "zero": zero, "offload": "parameters"}).parts["offload"] for zero in (1, 2, 3)]
    assert seconds[1] < seconds[2] < seconds[0]  # once, twice, twice and whole
    assert step_of({"dp_shard": 8}).parts["offload"] == 0.0


def test_parts_make_the_step():
    for layout in ({"dp_shard": 8, "offload": "parameters"}, {"dp_shard": 8, "offload": "activations"}):
        step = step_of(layout)
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
