"""The predicted timeline of a rank against the step that the planner predicts: two ways to one figure."""

import pytest

from shardwise.planner.memory.stages import chunks_of
from shardwise.planner.rank_timeline import predict_schedule, predict_timeline
from shardwise.planner.recompute import recompute_of
from shardwise.planner.stacks import STACKS
from shardwise.planner.step import StepModel
from shardwise.planner.subject import Subject
from shardwise.spec import Cluster, Layout
from shardwise.spec.presets import model_preset


def subject_of(layout, micro_batches, model="llama3-8b", stack="shardwise"):
    layout = Layout.load(layout)
    cluster = Cluster.load({"gpu": "h100-sxm", "gpus": layout.world})
    return Subject(
        model_preset(model), layout, cluster, STACKS[stack], 4096, micro_batches,
        recompute=recompute_of(layout.recompute),
    )  # fmt: skip


PIPELINES = [
    {"pp": 4, "schedule": schedule, "virtual_stages": virtual, "dp_shard": 2, "zero": 2}
    for schedule, virtual in [
        ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved-zb", 2), ("zbv", 2),
        ("dualpipev", 2),
    ]
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "micro_batches", "options"),
    [
        ({"dp_shard": 8}, 2, {}),
        ({"dp_shard": 8, "recompute": "full"}, 2, {"stack": "deepspeed"}),
        ({"dp_replicate": 8, "zero": 0}, 2, {}),
        ({"dp_replicate": 2, "dp_shard": 8, "tp": 2, "zero": 2, "async_tp": True}, 2, {}),
        ({"dp_shard": 8, "tp": 2, "cp": 2, "recompute": "selective"}, 1, {}),
        ({"dp_shard": 8, "ep": 8}, 1, {"model": "qwen3-30b-a3b"}),
        ({"dp_shard": 8, "pp": 8, "zero": 2}, 40, {}),  # more than the step model simulates
        ({"dp_shard": 8, "ep": 8, "pp": 4, "zero": 2, "schedule": "interleaved", "virtual_stages": 3}, 8,
         {"model": "qwen3-30b-a3b"}),
        ({"dp_shard": 8, "zero": 1, "loss": "chunked", "offload": "optimizer"}, 2, {}),
        ({"dp_shard": 8, "offload": "parameters"}, 2, {"model": "qwen3-30b-a3b"}),
        ({"dp_shard": 2, "pp": 4, "zero": 2, "offload": "activations", "recompute": "selective"}, 8, {}),
        *((layout, 16, {}) for layout in PIPELINES),
    ],
)  # fmt: skip
def test_its_total_is_the_predicted_step(layout, micro_batches, options):
    subject = subject_of(layout, micro_batches, **options)
    step = StepModel(subject).predict(subject)
    for rank in (0, subject.layout.world - 1):
        timeline = predict_timeline(subject, rank)
        assert timeline.seconds == pytest.approx(step.seconds, rel=0.001)
        assert timeline.rank == rank
    # What is written as exposed within layers is what the step model exposes on the busiest rank, whose layers may be
    # more than the last one's.
    held = [
        sum(chunk.layers for chunk in chunks_of(subject, subject.layout, rank).values())
        for rank in range(subject.layout.pp)
    ]
    for kind in ("tensor", "context", "expert"):
        each = timeline.exposed(kind) / held[-1]
        assert each * min(held) * 0.999 <= step.parts[kind] <= each * max(held) * 1.001


def test_without_pipeline_data_parallelism_sticks_out_as_far_as_predicted():
    subject = subject_of({"dp_shard": 8}, 2, stack="deepspeed")  # hides nothing
    step = StepModel(subject).predict(subject)
    timeline = predict_timeline(subject)
    assert timeline.exposed("all_gather") + timeline.exposed("reduce_scatter") == pytest.approx(step.parts["data"])
    assert timeline.busy("idle") == pytest.approx(0.0, abs=1e-9)


def test_one_pipeline_rank_waits_for_the_bubble():
    subject = subject_of({"pp": 4, "dp_shard": 2, "zero": 2}, 8)
    timeline = predict_timeline(subject, 7)
    assert timeline.busy("idle") + timeline.exposed("pipeline") > 0.1 * timeline.seconds
    first = min(span.start for span in timeline if span.stream == "compute")
    assert first > 0  # the last rank begins when the first micro-batch arrives
    assert {span.name for span in timeline if span.stream == "pipeline"} == {
        f"receive activations of micro-batch {number}" for number in range(8)
    }


def test_the_schedule_has_every_action_of_every_rank():
    rows = predict_schedule(subject_of(PIPELINES[-2], 8))
    assert len(rows) == 4
    for row in rows:
        assert sorted((box.kind, box.chunk, box.micro_batch) for box in row) == sorted(
            (kind, chunk, number) for kind in "FIW" for chunk in (0, 1) for number in range(8)
        )
    assert [len(row) for row in predict_schedule(subject_of({"dp_shard": 8}, 3))] == [6]


def test_a_rank_that_does_not_exist():
    with pytest.raises(ValueError, match="ranks 0 to 7"):
        predict_timeline(subject_of({"dp_shard": 8}, 1), 8)
