"""Loss bands: reading, interpolating, judging; and the ones that are shipped."""

import json
import math
from pathlib import Path

import pytest
import yaml

from shardwise.evaluation.bands import Bands, check_all, load_bands, summarize
from shardwise.spec import InputError, load_run
from shardwise.spec.trainable import require_trainable
from shardwise.verbs.resolve import resolve_layout

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

POINTS = [
    {"tokens": "1K", "loss": 4.0, "tolerance": 0.2},
    {"tokens": "4K", "loss": 3.0, "tolerance": 0.1},
    {"tokens": "8K", "loss": 2.5, "tolerance": 0.1},
]
RUN = {
    "model": "tiny-gpt",
    "cluster": {"gpu": "cpu"},
    "recipe": {"sequence": 100, "batch_tokens": 1000, "steps": 10, "evaluation": {"every": 2}},
}


def bands(points=POINTS):
    return Bands.load({"name": "made up", "source": "nobody", "points": points})


def write(path, **fields):
    path.write_text(yaml.safe_dump({"name": "made up", "source": "nobody", "points": POINTS} | fields))
    return path


def test_points_are_met_exactly_and_between_them_over_log_tokens():
    assert [(bands().at(tokens).loss, bands().at(tokens).tolerance) for tokens in (1000, 4000, 8000)] == [
        (4.0, 0.2), (3.0, 0.1), (2.5, 0.1),
    ]  # fmt: skip
    middle = bands().at(2000)
    assert math.isclose(middle.loss, 3.5)
    assert math.isclose(middle.tolerance, 0.15)
    assert math.isclose(bands().at(6000).loss, 3 - 0.5 * math.log(1.5) / math.log(2))


def test_nothing_is_expected_outside_of_the_points():
    assert bands().at(999) is None
    assert bands().at(8001) is None
    assert bands().check(999, 100.0) is None
    assert bands(POINTS[:1]).at(1000).loss == 4.0


def test_verdict():
    inside, outside = bands().check(4000, 3.0999), bands().check(4000, 3.1001)
    assert inside.inside and not outside.inside
    assert inside.dump() == {"expected_loss": 3.0, "tolerance": 0.1, "inside": True}
    assert outside.describe() == "validation loss 3.1001 at 4,000 tokens: expected 3.0000 ± 0.1: OUTSIDE"
    large = bands([{"tokens": 655360000, "loss": 4.1296, "tolerance": 0.03}])
    assert large.check(655360000, 4.129).describe() == (
        "validation loss 4.1290 at 0.655 B tokens: expected 4.1296 ± 0.03: inside"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"point": []}, "did you mean 'points'"),
        ({"points": []}, "points"),
        ({"points": POINTS[::-1]}, "tokens must ascend, but 4000 comes after 8000"),
        ({"points": [{"tokens": 5, "loss": 1}]}, "points.0.tolerance: is required"),
        ({"points": [{"tokens": 5, "loss": 1, "tolerance": 0}]}, "points.0.tolerance"),
        ({"points": [{"tokens": 5, "loss": ".nan", "tolerance": 1}]}, "points.0.loss"),
        ({"points": [{"tokens": "1M", "loss": 1, "tolerance": 1}]}, "never evaluated between 1M and 1M tokens"),
    ],
)
def test_mistakes_are_named(tmp_path, fields, message):
    path = write(tmp_path / "bands.yaml", **fields)
    with pytest.raises(InputError) as error:
        load_bands(path, load_run(RUN))
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_no_such_file_and_not_a_mapping(tmp_path):
    write(tmp_path / "bands.yaml")
    with pytest.raises(InputError, match="did you mean"):
        load_bands(tmp_path / "band.yaml", load_run(RUN))
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(InputError, match="a mapping with name, source and points"):
        load_bands(tmp_path / "list.yaml", load_run(RUN))


def test_a_run_that_is_never_evaluated_is_refused(tmp_path):
    path = write(tmp_path / "bands.yaml")
    for change in ({"evaluation": {"every": 2, "tokens": 0}}, {"evaluation": {"every": 0}}):
        run = load_run({**RUN, "recipe": {**RUN["recipe"], **change}})  # the last step is after the last point
        with pytest.raises(InputError, match="never evaluated"):
            load_bands(path, run)


def test_all_lines_are_judged_and_summed_up(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    assert summarize(path) == (False, "no validation loss was compared with its band")
    lines = [(2, 3.5), (4, 3.3), (8, 2.45), (10, 9.0)]  # inside, OUTSIDE, inside, not expected
    path.write_text("".join(json.dumps({"step": step, "loss": loss, "inside": None}) + "\n" for step, loss in lines))
    check_all(path, bands(), 1000)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record.get("inside") for record in records] == [True, False, True, None]
    assert summarize(path) == (False, "validation loss OUTSIDE its band at 1 of 3 evaluations: step 4")
    path.write_text(json.dumps(records[0]) + "\n")
    assert summarize(path) == (True, "validation loss inside its band at 1 of 1 evaluations")


def gpt2():
    return load_run(EXAMPLES / "gpt2-124m.yaml")


@pytest.mark.parametrize("world", [1, 8])
@pytest.mark.parametrize("layout", ["auto", "documented"])
def test_the_gpt2_recipe_is_legal(world, layout):
    if layout == "auto":
        run = gpt2()
    else:
        replicas = {1: "{micro_batch: 32}", 8: "{dp_replicate: 8, micro_batch: 32}"}[world]
        assert replicas in (EXAMPLES.parent / "docs" / "gpt2-124m.md").read_text()
        run = load_run(EXAMPLES / "gpt2-124m.yaml", [("layout", replicas)])
    require_trainable(resolve_layout(run, world), world)


def test_the_gpt2_recipe_is_that_of_llm_c():
    run = gpt2()
    recipe = run.recipe
    assert (recipe.batch_tokens, recipe.total_steps, recipe.sequence) == (524_288, 18_865, 1024)
    assert run.model.vocabulary == 50_304
    assert recipe.optimizer.dump() | {"momentum": 0} == {
        "name": "adamw", "lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0, "clip": 1.0,
    }  # fmt: skip
    assert (recipe.schedule.name, recipe.schedule.warmup_steps, recipe.schedule.floor) == ("cosine", 700, 0.0)
    assert (recipe.evaluation.every, recipe.evaluation.tokens) == (250, 10_485_760)


def test_every_gpt2_evaluation_has_a_band():
    run = gpt2()
    expected = load_bands(EXAMPLES / "gpt2-124m-bands.yaml", run)
    steps = [*range(250, 18_865, 250), 18_865]
    points = [expected.at(step * run.recipe.batch_tokens) for step in steps]
    losses = [point.loss for point in points]
    assert losses == sorted(losses, reverse=True)
    assert all(0.015 <= point.tolerance < 0.1 for point in points)
    assert points[steps.index(1250)].loss == 4.1296
