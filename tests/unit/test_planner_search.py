"""The search finds what brute force finds, offers only what is legal, and says why it refused the rest."""

from dataclasses import replace

import pytest

from shardwise.planner.memory import predict_memory, verdict
from shardwise.planner.recompute import recompute_of
from shardwise.planner.search import candidates, search
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
    """Every candidate as a Subject, without any shortcut."""
    base = Subject(model, Layout.load({}), chips, STACK, batch.sequence, 1)
    rejected = __import__("collections").Counter()
    for layout, micro_batches, recompute, schedules in candidates(model, chips, batch, rejected):
        for schedule, virtual in schedules:
            changes = {"schedule": schedule, "virtual_stages": virtual, "recompute": recompute}
            chosen = Layout.load(layout.model_copy(update=changes).model_dump())
            yield replace(base, layout=chosen, micro_batches=micro_batches, recompute=recompute_of(recompute))


@pytest.mark.parametrize("gpus", [2, 8])
def test_the_first_answer_is_the_fastest_that_fits(gpus):
    model, chips, batch = model_preset("llama3.2-3b"), cluster(gpus), recipe()
    fitting = [
        (predict_step(subject).seconds, subject)
        for subject in everything(model, chips, batch)
        if verdict(predict_memory(subject), chips.gpu) != "oom"
    ]
    best = min(fitting, key=lambda pair: pair[0])
    first = search(model, chips, batch, STACK).found[0]
    assert first.step.seconds == pytest.approx(best[0], rel=1e-6)
    assert first.verdict != "oom"


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


def test_estimates_are_close_to_simulation():
    """The closed forms only choose what is simulated, but they must not be far off."""
    model, chips, batch = model_preset("llama3-8b"), cluster(32), recipe()
    ratios = []
    for number, subject in enumerate(everything(model, chips, batch)):
        if number % 97 == 0:
            layout = subject.layout
            (estimate,) = StepModel(subject).estimate(
                subject, subject.micro_batches, [(layout.schedule, layout.virtual_stages)]
            )
            ratios.append(estimate / predict_step(subject).seconds)
    assert len(ratios) > 50
    assert 0.6 < min(ratios) <= max(ratios) < 1.35
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1.0, abs=0.05)
