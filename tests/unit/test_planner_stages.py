"""Pipeline stages of equal predicted cost."""

import itertools

import pytest

from shardwise.planner.memory.stages import chunks_of
from shardwise.planner.schedules import stages_of
from shardwise.planner.stacks import STACKS
from shardwise.planner.stages import _flops, cut_of, own_stages, stage_layers
from shardwise.planner.subject import Subject
from shardwise.planner.work import block_work, head_work
from shardwise.spec import Cluster, Layout, Model, load_run

SEQUENCE = 512


def model(layers: int, vocabulary: int = 256, **fields) -> Model:
    data = {"preset": "tiny-llama", "layers": layers, "vocabulary": vocabulary, **fields}
    return load_run({"model": data, "cluster": {"gpu": "cpu"}, "recipe": {"sequence": SEQUENCE}}).model


def costs_of(found: Model) -> tuple[list[float], float]:
    one = Layout(zero=0)
    costs = [_flops(block_work(found, one, 1, SEQUENCE, layer=layer)) for layer in range(found.layers)]
    return costs, _flops(head_work(found, one, 1))


def largest(costs: list[float], head: float, cut: tuple[range, ...]) -> float:
    sums = [sum(costs[layer] for layer in layers) for layers in cut]
    sums[-1] += head
    return max(sums)


def least(costs: list[float], head: float, stages: int) -> float:
    """By trying every cut."""
    count = len(costs)
    return min(
        largest(costs, head, tuple(range(*ends) for ends in itertools.pairwise((0, *inner, count))))
        for inner in itertools.combinations(range(1, count), stages - 1)
    )


SMALL = [
    *(model(layers, vocabulary) for layers in (3, 5, 7, 8) for vocabulary in (8, 256, 5_000, 50_000)),
    *(
        model(8, vocabulary, experts={"count": 16, "top_k": 4, "ffn": 300, "dense_layers": dense})
        for dense in (1, 3)
        for vocabulary in (8, 5_000)
    ),
]


@pytest.mark.parametrize("found", SMALL, ids=lambda found: f"{found.layers}-{found.vocabulary}-{bool(found.experts)}")
def test_no_other_cut_has_a_cheaper_costliest_stage(found):
    costs, head = costs_of(found)
    for stages in range(1, found.layers + 1):
        cut = stage_layers(found, stages, SEQUENCE)
        assert [layer for layers in cut for layer in layers] == list(range(found.layers))
        assert len(cut) == stages and all(cut)
        assert largest(costs, head, cut) <= least(costs, head, stages) * (1 + 1e-6)


def test_what_rounding_leaves_goes_to_later_stages():
    """Three layers are the most of any stage, so that the last, which has the head, too, has two."""
    assert [len(layers) for layers in stage_layers(model(9, vocabulary=8), 4, SEQUENCE)] == [2, 2, 3, 2]
    assert [len(layers) for layers in stage_layers(model(10, vocabulary=8), 4, SEQUENCE)] == [2, 3, 3, 2]


def test_a_large_vocabulary_takes_layers_off_the_last_stage():
    sizes = [len(layers) for layers in stage_layers(model(32, vocabulary=20_000), 4, SEQUENCE)]
    assert sizes[-1] < min(sizes[:-1])
    assert sum(sizes) == 32


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="5 stages need as many layers, but the model has 4"):
        stage_layers(model(4), 5, SEQUENCE)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_the_ranks_share_all_layers(schedule):
    found, virtual = model(13), 1 if schedule == "1f1b" else 2
    layout = Layout(pp=3, schedule=schedule, virtual_stages=virtual, zero=0)
    held = [own_stages(found, layout, SEQUENCE, rank) for rank in range(3)]
    assert [list(stages) for stages in held] == [stages_of(schedule, 3, virtual, rank) for rank in range(3)]
    assert sorted(layer for stages in held for layers in stages.values() for layer in layers) == list(range(13))


def test_planner_and_trainer_cut_alike_and_other_software_by_number():
    found = model(32, vocabulary=20_000)
    layout = Layout(pp=4, zero=0)
    cluster = Cluster(gpu="h100-sxm", gpus=4)
    for name, stack in STACKS.items():
        subject = Subject(found, layout, cluster, stack, SEQUENCE, 8)
        planned = [chunks_of(subject, layout, rank)[rank].layers for rank in range(4)]
        assert planned == [len(layers) for layers in cut_of(subject, 4)]
        if name == "shardwise":
            assert planned == [len(own_stages(found, layout, SEQUENCE, rank)[rank]) for rank in range(4)]
        else:
            assert planned == [8, 8, 8, 8]
