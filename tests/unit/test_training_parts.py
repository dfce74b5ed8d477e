"""Schedules, optimizer groups, metrics and their file."""

import json
import math

import pytest
import torch

from shardwise.model.decoder import Decoder
from shardwise.model.loss import IGNORED, cross_entropy_sum
from shardwise.spec import Optimizer, load_run
from shardwise.spec.presets import model_preset
from shardwise.training import loss_scale
from shardwise.training.loss_scale import LossScale
from shardwise.training.metrics import Journal, Utilisation
from shardwise.training.optimizer import plain_optimizer
from shardwise.training.schedule import learning_rate


def recipe(**schedule):
    recipe = {"sequence": 8, "batch_tokens": 8, "steps": 100, "optimizer": {"lr": 1.0}, "schedule": schedule}
    return load_run({"model": "tiny-gpt", "cluster": {"gpu": "cpu"}, "recipe": recipe}).recipe


def test_warmup_ends_at_the_highest_rate():
    rates = [learning_rate(recipe(name="constant", warmup_steps=4), index) for index in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_ends_at_the_floor():
    cosine = recipe(name="cosine", warmup_steps=20, floor=0.1)
    assert learning_rate(cosine, 20) == pytest.approx(1.0, abs=1e-3)
    assert learning_rate(cosine, 59) == pytest.approx(0.55)  # half way through the 80 that are left
    assert learning_rate(cosine, 99) == pytest.approx(0.1)


def test_wsd_is_stable_then_falls_linearly():
    wsd = recipe(name="wsd", warmup_steps=10, decay_fraction=0.4, floor=0.0)
    assert {learning_rate(wsd, index) for index in range(10, 60)} == {1.0}
    assert learning_rate(wsd, 79) == pytest.approx(0.5)
    assert learning_rate(wsd, 99) == 0.0


def test_schedules_shorter_than_their_parts():
    assert learning_rate(recipe(name="wsd", warmup_steps=500), 99) == pytest.approx(1.0)
    assert learning_rate(recipe(name="wsd", decay_fraction=0.0), 99) == 1.0
    assert learning_rate(recipe(name="cosine", warmup_steps=99, floor=0.5), 99) == pytest.approx(0.5)


def test_only_matrices_decay_and_adamw_is_fused():
    decoder = Decoder(model_preset("tiny-gpt"))
    optimizer = plain_optimizer(list(decoder.named_parameters()), Optimizer())
    decayed, plain = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert decayed["weight_decay"] == 0.1
    assert {p.ndim for p in plain["params"]} == {1}
    assert plain["weight_decay"] == 0.0
    assert decayed["fused"]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(decoder.parameters()))


def test_loss_is_a_sum_over_targets():
    logits, labels = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[0, 1, IGNORED], [2, IGNORED, IGNORED]])
    expected = -sum(logits[at].log_softmax(-1)[labels[at]] for at in [(0, 0), (0, 1), (1, 0)])
    torch.testing.assert_close(cross_entropy_sum(logits, labels), expected)
    assert cross_entropy_sum(logits.bfloat16(), labels).dtype == torch.float32


def test_unknown_peak_means_no_mfu():
    run = load_run({"model": "tiny-gpt", "cluster": {"gpu": "cpu"}, "layout": {}, "recipe": {"sequence": 8}})
    values = Utilisation(run, torch.device("cpu")).of(1000.0)
    assert values == {"mfu": None, "mfu_full_attention": None, "hfu": None}


def test_mfu_by_hand(monkeypatch):
    """GPT-2 124M at 500,000 tokens/s on one chip of 989.4 TFLOP/s, both conventions."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    run = load_run({"model": "gpt2-124m", "cluster": {"gpu": "h200-sxm"}, "layout": {}, "recipe": {"sequence": 1024}})
    values = Utilisation(run, torch.device("cuda")).of(500_000.0)
    weights = 12 * (12 * 768**2) + 50257 * 768
    full = 6 * weights + 12 * 12 * 768 * 1024
    assert values["mfu_full_attention"] == pytest.approx(full * 5e5 / 989.4e12)
    assert values["mfu"] == pytest.approx((full - 6 * 12 * 768 * 1023) * 5e5 / 989.4e12)
    assert values["hfu"] == values["mfu"]


def test_journal_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, 0)
    for step in range(1, 6):
        journal.write({"step": step, "loss": 1 / 3})
    journal.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # the machine went away here
    journal = Journal(path, 3)
    journal.write({"step": 4, "loss": math.pi})
    journal.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[0]["loss"] == 1 / 3
    assert records[3]["loss"] == math.pi


def test_journal_of_a_new_run_drops_everything(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    Journal(path, 0).close()
    assert path.read_text() == ""


def test_loss_scale_halves_at_once_and_doubles_slowly(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 3)
    scale = LossScale("fp16")
    seen = []
    for finite in (False, True, True, False, True, True, True, True):
        scale.update(finite)
        seen.append(scale.value / 2**16)
    assert seen == [0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5]
    other = LossScale("fp16")
    other.load(scale.state())
    for finite in (True, True):
        other.update(finite)
    assert other.value == 2**16  # one good step was carried over
    assert LossScale("bf16").state() == {}
