"""Schedules against PyTorch's tables, and the simulation against closed forms."""

import itertools
import random
import re

import pytest

from shardwise.planner.pipeline import in_flight, simulate, total_seconds
from shardwise.planner.schedules import Action, order

TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
CHUNKS = {"gpipe": [1], "1f1b": [1], "interleaved": [2, 3], "interleaved-zb": [2, 3], "zbv": [2], "dualpipev": [2]}


def torch_order(schedule, pipeline, micro_batches, chunks):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    options = {} if chunks == 1 else {"num_stages_per_rank": chunks}
    rows = get_schedule_ops(TORCH[schedule], pipeline, micro_batches, **options)
    return [
        [
            Action(int(stage), kind, int(micro_batch))
            for action in row
            if action is not None
            for stage, kind, micro_batch in re.findall(r"(\d+)([FBIW])(\d+)", str(action))
        ]
        for row in rows
    ]


@pytest.mark.parametrize("schedule", TORCH)
def test_order_is_pytorchs(schedule):
    compared = 0
    for pipeline, micro_batches, chunks in itertools.product(
        [2, 3, 4, 8], [2, 3, 4, 6, 8, 12, 16, 17, 24], CHUNKS[schedule]
    ):
        try:
            expected = torch_order(schedule, pipeline, micro_batches, chunks)
        except ValueError:  # fewer micro-batches than stages, or not a multiple of the rounds
            continue
        actual = order(schedule, pipeline, micro_batches, chunks)
        if schedule == "1f1b":  # the table of the last rank numbers its forwards from 1: a slip of the visualizer
            expected[-1] = [action for action in actual[-1] if action.kind in "FB"]
            assert [a.kind for a in torch_order(schedule, pipeline, micro_batches, chunks)[-1]] == [
                a.kind for a in actual[-1]
            ]
        assert actual == expected, (pipeline, micro_batches, chunks)
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize("schedule", TORCH)
def test_every_action_runs_once(schedule):
    chunks = CHUNKS[schedule][0]
    programs = order(schedule, 4, 8, chunks)
    for kind_set in ("F", "BI", "BW"):
        seen = [(a.stage, a.micro_batch) for program in programs for a in program if a.kind in kind_set]
        assert sorted(seen) == [(stage, m) for stage in range(4 * chunks) for m in range(8)]


def durations(stages, forward=1.0, input_gradient=1.0, weight_gradient=1.0):
    kinds = {"F": forward, "B": input_gradient + weight_gradient, "I": input_gradient, "W": weight_gradient}
    return {(stage, kind): kinds[kind] for stage in range(stages) for kind in kinds}


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("hop", [0.0, 0.3])
def test_the_total_alone_is_that_of_the_simulation(schedule, hop):
    random_ = random.Random(1)
    chunks = CHUNKS[schedule][0]
    for pipeline, micro_batches in ((2, 4), (4, 8), (4, 12)):
        seconds = {
            (stage, kind): random_.uniform(0.5, 2.0)
            for stage in range(pipeline * chunks)
            for kind in ("F", "B", "I", "W")
        }
        run = simulate(order(schedule, pipeline, micro_batches, chunks), seconds, hop)
        assert total_seconds(schedule, pipeline, micro_batches, chunks, seconds, hop) == run.seconds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 2), (4, 8), (8, 32)])
def test_bubble_of_plain_schedules(schedule, pipeline, micro_batches):
    """(p - 1) / (m + p - 1)."""
    run = simulate(order(schedule, pipeline, micro_batches), durations(pipeline), 0.0)
    assert run.seconds == pytest.approx((micro_batches + pipeline - 1) * 3)
    assert run.bubble_fraction == pytest.approx((pipeline - 1) / (micro_batches + pipeline - 1))


def test_interleaving_divides_the_bubble():
    plain = simulate(order("1f1b", 4, 16), durations(4), 0.0)
    split = simulate(order("interleaved", 4, 16, 2), durations(8, 0.5, 0.5, 0.5), 0.0)
    assert plain.seconds - 48 == pytest.approx(9)
    assert split.seconds - 48 == pytest.approx(4.5)


def test_zero_bubble_schedules_have_less():
    plain = simulate(order("1f1b", 4, 16), durations(4), 0.0)
    for schedule in ("interleaved-zb", "zbv", "dualpipev"):
        run = simulate(order(schedule, 4, 16, 2), durations(8, 0.5, 0.5, 0.5), 0.0)
        assert run.seconds < plain.seconds - 4


def test_hops_between_ranks_cost_and_within_a_rank_do_not():
    run = simulate(order("1f1b", 2, 1), durations(2), 0.25)
    assert run.seconds == pytest.approx(6.5)
    folded = simulate(order("zbv", 1, 1), durations(2), 0.25)
    assert folded.seconds == pytest.approx(6)


def test_activations_in_flight():
    """GPipe holds all m; 1F1B at most p - rank."""
    assert max(counts[0] for counts in in_flight(order("gpipe", 4, 12)[0])) == 12
    for rank, program in enumerate(order("1f1b", 4, 12)):
        assert max(counts[rank] for counts in in_flight(program)) == 4 - rank


def test_a_deadlock_is_an_error():
    with pytest.raises(ValueError, match="deadlock"):
        simulate([[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]], durations(2), 0.0)
