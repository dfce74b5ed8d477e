"""The search finds what brute force finds, offers only what is legal, and says why it refused the rest."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from shardwise.planner.candidates import spaces, variants
from shardwise.planner.estimate import Estimates
from shardwise.planner.memory import predict_memory, verdict
from shardwise.planner.memory.bound import least_used
from shardwise.planner.offload import host_bytes, verdict_of
from shardwise.planner.recompute import recompute_of
from shardwise.planner.search import _Stream, search
from shardwise.planner.stacks import STACKS
from shardwise.planner.step import StepModel, predict_step
from shardwise.planner.subject import Subject
from shardwise.spec import Cluster, InputError, Layout, Recipe
from shardwise.spec.legality import illegal
from shardwise.spec.presets import model_preset

STACK = STACKS["shardwise"]


def recipe(**values):
    return Recipe.load({"sequence": 4096, "batch_tokens": 4096 * 256, **values})


def cluster(gpus, gpu="h100-sxm"):
    return Cluster.load({"gpu": gpu, "gpus": gpus})


def everything(model, chips, batch):
    """Every layout of the space as a Subject, without any shortcut."""
    base = Subject(model, Layout.load({}), chips, STACK, batch.sequence, 1)
    for space in spaces(model, chips, batch, Counter()):
        sizes = zip(space.sizes, space.allowed, strict=True)
        for split, (size, allowed), recompute in product(space.splits, sizes, space.recomputes):
            for (schedule, virtual), can in zip(space.schedules, allowed, strict=True):
                for loss, offload in variants(chips) if can else ():
                    layout = Layout.load(
                        {**split.model_dump(), "micro_batch": size[0], "recompute": recompute, "schedule": schedule,
                         "virtual_stages": virtual, "loss": loss, "offload": offload}
                    )  # fmt: skip
                    yield replace(base, layout=layout, micro_batches=size[1], recompute=recompute_of(recompute))


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "sequences"),
    [
        ("llama3.2-3b", "h100-sxm", 4, 8),
        ("llama3.2-1b", "l4", 2, 4),
        ("gpt2-1.5b", "l4", 1, 4),
        ("llama3.2-3b", "l40s", 1, 8),
    ],
)
def test_the_first_answer_is_the_fastest_that_fits(name, gpu, gpus, sequences):
    length = 1024 if name.startswith("gpt2") else 2048
    model, chips = model_preset(name), cluster(gpus, gpu)
    batch = recipe(batch_tokens=length * sequences, sequence=length)
    steps = StepModel(Subject(model, Layout.load({}), chips, STACK, batch.sequence, 1))
    fitting = [
        (steps.predict(subject).seconds, number, subject.layout)
        for number, subject in enumerate(everything(model, chips, batch))
        if verdict_of(subject, predict_memory(subject)) != "oom"
    ]
    seconds, _, layout = min(fitting)
    first = search(model, chips, batch, STACK).found[0]
    assert first.verdict != "oom"
    assert first.step.seconds == pytest.approx(seconds, rel=1e-9), (first.layout, layout)


def test_all_that_is_offered_is_legal():
    for name in ("llama3-8b", "qwen3-30b-a3b"):
        model, batch = model_preset(name), recipe()
        for found in search(model, cluster(64), batch, STACK, top=24).found:
            assert list(illegal(model, found.layout, batch)) == []
            assert found.layout.world == 64


def test_refusals_are_counted_by_reason():
    result = search(model_preset("gpt2-124m"), cluster(8), Recipe.load({"sequence": 1024}), STACK)
    assert result.rejected["layout.tp does not divide model.vocabulary"] > 0


def test_nothing_fits_is_an_answer():
    result = search(model_preset("llama3-405b"), cluster(8), recipe(), STACK)
    assert [found.verdict for found in result.found] == ["oom"]
    assert result.rejected["out of memory"] > 0


def test_nothing_is_legal_is_an_error():
    with pytest.raises(InputError, match="no layout of gpt2-124m on 8 × h100-sxm is legal"):
        search(model_preset("gpt2-124m"), cluster(8), Recipe.load({"sequence": 1000, "batch_tokens": 1000}), STACK)


SPACES = [("llama3-8b", 32), ("qwen3-30b-a3b", 16)]


def sampled(name, gpus, every, chosen=None):
    """Each `every`-th layout: its Space, its place there, and the Subject."""
    model, chips, batch = model_preset(name), cluster(gpus), recipe()
    base = Subject(model, Layout.load({}), chips, STACK, batch.sequence, 1)
    steps, number = StepModel(base), 0
    for space in spaces(model, chips, batch, Counter()):
        times = Estimates(steps, base, space)
        for loss, offload in chosen or variants(chips):
            stream = _Stream(base, space, times, loss, offload)
            seconds = times.seconds(loss, offload)
            used = least_used(base, space, loss=loss, offload=offload)
            for index in zip(*np.nonzero(np.broadcast_to(stream.allowed, stream.shape)), strict=True):
                number += 1
                if number % every == 0:
                    yield stream.subject(index), seconds[index], used[index]


def test_estimates_are_close_to_simulation():
    """The closed forms only choose what is simulated, but they must not be far off."""
    ratios = [
        seconds / predict_step(subject).seconds
        for subject, seconds, _ in sampled("llama3-8b", 32, 197, [("full", "none"), ("chunked", "optimizer")])
    ]
    assert len(ratios) > 50
    assert 0.6 < min(ratios) <= max(ratios) < 1.35
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("name", "gpus"), SPACES)
def test_the_bound_is_never_above_the_memory(name, gpus):
    shares = [used / predict_memory(subject).used[0] for subject, _, used in sampled(name, gpus, 499)]
    assert len(shares) > 100
    assert max(shares) <= 1 + 1e-9
    assert sorted(shares)[len(shares) // 2] > 0.8  # and it is of use


@pytest.mark.parametrize(("name", "gpus"), SPACES)
def test_nothing_is_faster_for_a_chunked_loss_or_offloading(name, gpus):
    """By more than what the search allows for."""
    model, chips, batch = model_preset(name), cluster(gpus), recipe()
    base = Subject(model, Layout.load({}), chips, STACK, batch.sequence, 1)
    steps = StepModel(base)
    for space in spaces(model, chips, batch, Counter()):
        times = Estimates(steps, base, space)
        for loss, offload in variants(chips):
            assert (times.seconds(loss, offload) > 0.99 * times.seconds("full", "none")).all()


def test_a_large_cluster_is_searched_to_the_end():
    """Llama 3 405B fits 16,384 H100 only with recompute or offloading, behind some 100,000 faster layouts."""
    first = search(model_preset("llama3-405b"), cluster(16384), Recipe.load({"sequence": 8192}), STACK).found[0]
    assert first.verdict != "oom"
    assert first.layout.recompute != "none" or first.layout.offload != "none"


def test_a_host_holds_no_more_than_it_has():
    layout = Layout.load({"dp_shard": 8, "micro_batch": 8, "offload": "activations", "loss": "chunked"})
    subject = Subject(model_preset("llama3-8b"), layout, cluster(8), STACK, 8192, 1)
    assert verdict(predict_memory(subject), subject.cluster.gpu) != "oom"
    assert host_bytes(subject) > 250e9
    assert verdict_of(subject, predict_memory(subject)) == "oom"
