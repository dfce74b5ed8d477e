"""report.html: complete, self-contained, readable, whatever the files hold."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from shardwise.report import page
from shardwise.report.breakdown import breakdown
from shardwise.report.chart import POINTS, Chart, Series, thin
from shardwise.report.page import render, write_report
from shardwise.report.results import read_results
from shardwise.report.ticks import duration, linear_ticks, log_ticks, short, tick_labels
from shardwise.spec import load_run

RUN = load_run({"model": "tiny-gpt", "cluster": {"gpu": "cpu"}, "recipe": {"batch_tokens": 1024, "steps": 6000}})
VOID = {"meta", "link", "path"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what the tests ask about."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)

    def all(self, tag, **attributes):
        return [a for t, a in self.tags if t == tag and all(a.get(key) == value for key, value in attributes.items())]

    def titles(self):
        return [a["aria-label"].split(",")[0] for a in self.all("svg")]


def step(number, **changes):
    return {
        "step": number, "tokens": 1024 * number, "loss": 3 + math.exp(-number / 10), "grad_norm": 0.5, "lr": 1e-3,
        "loss_scale": None, "step_seconds": 0.1, "tokens_per_second": 10240.0, "mfu": 0.3, "mfu_full_attention": 0.35,
        "hfu": 0.3, "peak_memory_gib": 1.5, "data_wait_fraction": 0.1,
    } | changes  # fmt: skip


def event(kind, number, second, seconds=0.0, **fields):
    where = {"world": 2, "device": "CPU", "layout": "dp_shard 2"} if kind in ("start", "resume") else {}
    time = f"2026-08-05T09:{second // 60:02}:{second % 60:02}.000+00:00"
    return {"event": kind, "step": number, "time": time, "seconds": seconds, **where, **fields}


def evaluation(number, loss=3.1, **fields):
    return {"step": number, "loss": loss, "bits_per_byte": 1.01, "tokens": 4096, **fields}


def write(out, steps=(), evaluations=(), events=(), run=RUN):
    out.mkdir(exist_ok=True)
    for name, records in (("metrics", steps), ("evaluations", evaluations), ("events", events)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (out / "run.yaml").write_text(run.to_yaml())
    return out


@pytest.fixture
def out(tmp_path):
    """40 steps, stopped after 20 and resumed; 8 s, of which 2 passed between the two sessions."""
    return write(
        tmp_path / "first",
        [step(number) for number in range(1, 41)],
        [evaluation(20, 3.2), evaluation(40)],
        [
            event("start", 0, 1, 1.0), event("save", 20, 3, 0.2), event("evaluation", 20, 4, 0.5),
            event("stop", 20, 4, 0.1, reason="SIGTERM"), event("resume", 20, 7, 1.0), event("save", 40, 9, 0.2),
            event("evaluation", 40, 10, 0.5), event("stop", 40, 10, 0.1, reason="done"),
        ],
    )  # fmt: skip


def test_headline(out):
    text = Page(render(out)).text
    for expected in ("tiny-gpt", "first · 2 × CPU · dp_shard 2", "done", "of 6,000", "41 K", "3.1000", "1.0100"):
        assert expected in text
    assert "10.2 K" in text and "5.12 K per rank" in text
    assert "30.0%" in text and "35.0%" in text
    assert "1.50 GiB" in text and "8.00 s" in text


def test_nothing_comes_from_elsewhere(out):
    text = render(out)
    found = Page(text)
    assert not found.all("script") and not found.all("img")
    assert [a["href"] for _, a in found.tags if "href" in a] == ["data:,"]
    assert not [a for _, a in found.tags if "src" in a]
    assert "url(" not in text and "@import" not in text and "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in found.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]


def test_it_fits_a_phone(out):
    text = render(out)
    assert Page(text).all("meta", name="viewport", content="width=device-width, initial-scale=1")
    sizes = re.findall(r"font(?:-size)?:\s*([\d.]+)(px|rem)", text)
    assert sizes and all(float(size) * (16 if unit == "rem" else 1) >= 16 for size, unit in sizes)
    assert "prefers-color-scheme: dark" in text


def test_charts_can_be_heard(out):
    found = Page(render(out))
    charts = found.all("svg")
    assert len(charts) == 5
    assert all(chart["role"] == "img" for chart in charts)
    assert charts[0]["aria-label"].startswith("Loss, nats per token, over steps. training: 3.9 at step 1, ")
    assert "validation: 3.2 at step 20, 3.1 at step 40" in charts[0]["aria-label"]
    (bar,) = [a for a in found.all("div") if a.get("role") == "img"]
    assert bar["aria-label"].startswith("Where the time went: compute 45.0%, input wait 5.0%, evaluation 12.5%")


def test_resumes_are_marked(out):
    found = Page(render(out))
    marks = found.all("path", **{"class": "mark"})
    assert len(marks) == 5
    assert len({mark["d"] for mark in marks}) == 1
    assert "the run was resumed after step 20" in found.text
    assert "ended after step 20: SIGTERM" in found.text


def test_where_the_time_went(out):
    time = breakdown(read_results(out))
    assert math.isclose(time.wall, 8.0)
    expected = {"compute": 3.6, "input wait": 0.4, "evaluation": 1.0, "saving": 0.6, "starting": 2.0, "other": 0.4}
    assert time.parts == pytest.approx(expected)
    assert (time.saves, time.killed) == (2, 0)
    assert time.slower_after_saves == pytest.approx(0)


def test_slower_steps_after_a_save_are_summed_up(tmp_path):
    steps = [step(number, step_seconds=0.3 if number in (21, 22, 35) else 0.1) for number in range(1, 41)]
    out = write(tmp_path / "run", steps, events=[event("start", 0, 1), event("save", 20, 3), event("stop", 40, 9)])
    assert breakdown(read_results(out)).slower_after_saves == pytest.approx(0.4)  # 35 is too late to blame
    assert "the ten steps after each were 0.40 s slower" in render(out)


def test_a_killed_session_counts_up_to_its_last_save(tmp_path):
    events = [event("start", 0, 2, 1.0), event("save", 4, 5, 0.1), event("resume", 4, 30, 1.0), event("stop", 8, 32)]
    out = write(tmp_path / "run", [step(number) for number in range(1, 9)], events=events)
    time = breakdown(read_results(out))
    assert math.isclose(time.wall, 4.0 + 3.0)
    assert time.killed == 1
    assert "1 session ended without a word" in render(out)


def test_loss_bands_are_shown(out):
    write(
        out, [step(number) for number in range(1, 41)],
        [
            evaluation(10), evaluation(20, expected_loss=3.1, tolerance=0.05, inside=True),
            evaluation(40, loss=3.4, expected_loss=3.1, tolerance=0.05, inside=False),
        ],
    )  # fmt: skip
    found = Page(render(out))
    assert "validation loss OUTSIDE its band at 1 of 2 evaluations" in found.text
    assert "3.1000 ± 0.05" in found.text and "not checked" in found.text
    assert len(found.all("path", **{"class": "spread"})) == 1
    assert len(found.all("path", **{"class": "dots outside"})) == 1


def test_the_sources_of_a_mixture_have_columns_of_their_own(tmp_path):
    records = [evaluation(2, **{"loss/code <1>": 2.9}), evaluation(4, bits_per_byte=None)]
    found = Page(render(write(tmp_path / "run", [step(number) for number in range(1, 5)], records)))
    assert "loss/code <1>" in found.texts and "2.9000" in found.texts
    assert "the bytes of its tokens are not known" in found.text


def test_unknown_utilisation_and_no_evaluations(tmp_path):
    steps = [step(number, mfu=None, mfu_full_attention=None, grad_norm=None) for number in range(1, 4)]
    found = Page(render(write(tmp_path / "run", steps)))
    assert found.text.count("this chip's peak is not known") == 2
    assert found.text.count("never evaluated") == 2
    assert "no numbers were recorded" in found.text  # where gradient norms would be
    assert "Evaluations" not in found.text


@pytest.mark.parametrize("steps", [1, 2, POINTS, POINTS + 1, 6000])
def test_any_number_of_steps(tmp_path, steps):
    records = [step(number, grad_norm=50.0 if number == 4321 else 0.5) for number in range(1, steps + 1)]
    text = render(write(tmp_path / "run", records))
    found = Page(text)
    assert not re.search(r"\b(nan|inf|None)\b", text)
    for path in found.all("path"):
        assert len(re.findall("[MLH]", path["d"])) <= POINTS
    assert len(text) < 300_000


def test_nothing_at_all(tmp_path):
    found = Page(render(tmp_path))
    assert "No step was recorded." in found.text
    assert "run.yaml could not be read" in found.text
    assert not found.all("svg")


def test_what_cannot_be_read_is_left_out_and_counted(out):
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": NaN, "tokens": "many"}\n[1, 2]\n{"step": null}\n{"step": 42, "lo')
    (out / "evaluations.jsonl").write_bytes(b"\xff\xfe\n" + json.dumps(evaluation(40, loss=None)).encode())
    found = Page(render(out))
    assert "3 lines of metrics.jsonl could not be read and are left out." in found.text
    assert "1 line of evaluations.jsonl could not be read and is left out." in found.text
    assert "41 of 6,000" in re.sub(" +", " ", found.text)
    assert not re.search(r"\b(nan|None|inf)\b", found.text)


def test_everything_is_escaped(tmp_path):
    attack = "<script>alert('&')</script>"
    run = RUN.replace(model=RUN.model.model_copy(update={"name": attack}))
    events = [
        event("start", 0, 1) | {"device": attack, "layout": attack}, event("stop", 2, 2, reason=attack),
    ]  # fmt: skip
    out = write(tmp_path / "a<b>&c", [step(1), step(2)], [evaluation(2)], events, run)
    found = Page(render(out))
    assert not found.all("script")
    assert found.all("b") == [{"aria-hidden": "true"}]  # the sign before the reason
    assert found.text.count(attack) >= 5
    assert "a<b>&c" in found.text


def test_a_page_that_cannot_be_written_costs_one_line(out):
    said = []
    write_report(out, said.append)
    assert said == [f"report: {out / 'report.html'}"]
    (out / "report.html").unlink()
    (out / "report.html").mkdir()
    (out / "report.html" / "in-the-way").touch()
    write_report(out, said.append)
    assert len(said) == 2 and said[1].startswith("report.html was not written: ")


def test_an_error_in_rendering_costs_one_line(out, monkeypatch):
    monkeypatch.setattr(page, "charts", lambda results: 1 / 0)
    said = []
    write_report(out, said.append)
    assert said == ["report.html was not written: ZeroDivisionError: division by zero"]
    assert not (out / "report.html").exists()


def test_a_spike_of_one_step_survives_thinning():
    x = np.arange(1.0, 10_001)
    y = np.ones_like(x)
    y[7_777], y[5], y[100:140] = 9.0, -9.0, np.nan
    middle, mean, low, high = thin(x, y)
    assert len(middle) == POINTS // 3
    assert high[np.isfinite(high)].max() == 9.0 and low[np.isfinite(low)].min() == -9.0
    assert middle[0] == np.mean(x[:37])
    assert np.isnan(mean).sum() == 0 or np.isnan(low[np.isnan(mean)]).all()


def test_unknown_values_break_the_line():
    series = Series("loss", np.array([1.0, 2, 3, 4, 5]), np.array([1.0, 2, np.nan, 4, 5]))
    found = Page(Chart("Loss", "nats", [series]).html())
    (line,) = found.all("path", **{"class": "line train"})
    assert line["d"].count("M") == 2


def test_a_logarithmic_axis_where_it_helps():
    wide, narrow = np.array([0.2, 1.0, 20.0]), np.array([0.2, 0.3, 0.4])
    for values, log in ((wide, True), (narrow, False)):
        text = Chart("Norm", "u", [Series("norm", np.arange(3.0), values)], may_be_log=True).html()
        assert ("logarithmic" in text) == log


def test_ticks():
    assert linear_ticks(0, 18_865, 5) == [0, 5000, 10_000, 15_000]
    assert tick_labels([3.2, 3.4, 3.6]) == ["3.2", "3.4", "3.6"]
    assert tick_labels([0, 2e-4, 4e-4]) == ["0", "2e-4", "4e-4"]
    assert tick_labels([0, 5e5, 1e6]) == ["0", "500 K", "1 M"]
    assert tick_labels([0, 5000, 10_000]) == ["0", "5,000", "10,000"]
    assert log_ticks(0.2, 20, 7) == pytest.approx([0.2, 0.5, 1, 2, 5, 10, 20])
    assert log_ticks(1e-3, 1e3, 5) == pytest.approx([1e-3, 1e-1, 1e1, 1e3])


def test_numbers_for_people():
    assert [short(number) for number in (0, 0.25, 12, 999.96, 397_000, 9_890_562_048)] == [
        "0", "0.25", "12", "1 K", "397 K", "9.89 B",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (0, 0.31, 42.3, 59.97, 725, 22_680, 187_200)] == [
        "0 s", "0.31 s", "42.3 s", "1 min 0 s", "12 min 5 s", "6 h 18 min", "2 d 4 h",
    ]  # fmt: skip
