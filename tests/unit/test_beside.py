"""Predicted beside measured: the line, its words, and what `plan` says of its own error."""

import json

from jobs import shardwise, write_run
from shardwise.spec import load_run
from shardwise.verbs.beside import append, in_words, line_of, median_step, own_error, predicted

RUN = {"model": "llama3.2-1b", "cluster": {"gpu": "h200-sxm"}, "layout": {"micro_batch": 2},
       "recipe": {"sequence": 4096, "batch_tokens": 8192, "steps": 4}}  # fmt: skip


def test_the_first_steps_do_not_count():
    assert median_step([9.0, 9.0, 1.0, 3.0, 2.0]) == 2.0
    assert median_step([9.0, 9.0, 1.0, 3.0]) is None


def test_a_line_and_its_words(tmp_path):
    run = load_run(RUN)
    found, notes = predicted(run)
    assert found is not None
    assert notes == ()
    line = line_of("train", run, found, step_seconds=2 * found.step.seconds, live_gib=None)
    assert line["predicted"]["live_gib"] is None
    assert in_words(line) == (
        f"predicted beside measured: step {found.step.seconds:.3g} s, {2 * found.step.seconds:.3g} s (−50.0 %)"
    )
    (tmp_path / "a").mkdir()
    append(tmp_path / "a", line)
    assert json.loads((tmp_path / "a" / "predictions.jsonl").read_text()) == line


def test_what_cannot_be_predicted_is_null():
    run = load_run({**RUN, "cluster": {"gpu": "cpu"}})  # no bf16 rate
    found, (note,) = predicted(run)
    assert found is None
    assert note.startswith("no prediction: ")
    line = line_of("train", run, found, step_seconds=1.0, live_gib=1.0)
    assert line["predicted"] == {"class": "closed-form", "step_seconds": None, "live_gib": None}
    assert in_words(line) is None


def test_the_planner_states_its_own_error(tmp_path):
    assert own_error(tmp_path, "h200-sxm") is None
    for number, (expected, chip) in enumerate([(1.1, "h200-sxm"), (0.8, "h200-sxm"), (9.0, "l4")]):
        directory = tmp_path / str(number)
        directory.mkdir()
        line = {"chip": chip, "predicted": {"step_seconds": expected}, "measured": {"step_seconds": 1.0}}
        (directory / "predictions.jsonl").write_text(json.dumps(line) + '\n{"half')
    text = own_error(tmp_path, "h200-sxm")
    assert text is not None
    assert text.endswith("step time off by 15.0 % in the median of 2")
    assert own_error(tmp_path, "l4").endswith("800.0 % in the median of 1")


def test_train_ends_with_it(tmp_path):
    code, output = shardwise("train", write_run(tmp_path), "--out", tmp_path / "out", "--nproc", "1")
    assert code == 0, output
    line = json.loads((tmp_path / "out" / "predictions.jsonl").read_text())
    assert line["verb"] == "train"
    assert line["measured"]["step_seconds"] > 0
    assert "predicted beside measured: step" in output
