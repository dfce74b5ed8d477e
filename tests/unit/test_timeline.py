"""Timelines of planted spans: every figure is known beforehand."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from shardwise.timeline import Box, Span, Timeline, compare_timelines, draw, schedule_svg, to_chrome
from shardwise.timeline.spans import shares

PLANTED = [
    Span("compute", 0.0, 2.0, "forward"),
    Span("compute", 3.0, 5.0, "backward"),
    Span("all_gather", 1.0, 2.5, "gather"),
    Span("all_gather", 1.5, 2.75, "gather"),  # overlaps the one before
    Span("reduce_scatter", 3.5, 6.0, "reduce"),
    Span("tensor", 4.0, 4.5, "hidden"),
]


def planted(**options):
    return Timeline.build(PLANTED, **options)


def test_busy_idle_and_exposed_are_exact():
    timeline = planted(seconds=8.0)
    assert timeline.busy("compute") == 4.0
    assert timeline.idle("compute") == 4.0
    assert timeline.busy("all_gather") == 1.75
    assert timeline.exposed("all_gather") == 0.75
    assert timeline.exposed("reduce_scatter") == 1.0
    assert timeline.exposed("tensor") == 0.0
    assert timeline.exposed("compute") == 0.0
    assert timeline.busy("expert") == timeline.exposed("expert") == 0.0
    assert timeline.streams == ("compute", "all_gather", "reduce_scatter", "tensor")


def test_spans_that_touch_are_one_stretch():
    timeline = Timeline.build([Span("compute", 0, 1, "a"), Span("compute", 1, 2, "b"), Span("tensor", 2, 3, "c")])
    start, end = timeline.covered("compute")
    assert start.tolist() == [0.0]
    assert end.tolist() == [2.0]
    assert timeline.exposed("tensor") == 1.0


def test_exposed_against_a_grid_of_moments():
    rng = np.random.default_rng(0)
    spans = []
    for stream in ("compute", "expert"):
        for start, length in zip(rng.integers(0, 200, 40), rng.integers(0, 9, 40), strict=True):
            spans.append(Span(stream, float(start), float(start + length), "x"))
    timeline = Timeline.build(spans)

    def runs(stream):
        cells = np.zeros(220, bool)
        for span in spans:
            if span.stream == stream:
                cells[int(span.start) : int(span.end)] = True
        return cells

    assert timeline.busy("expert") == runs("expert").sum()
    assert timeline.exposed("expert") == (runs("expert") & ~runs("compute")).sum()


def test_idle_is_what_nothing_else_covers():
    timeline = planted(seconds=8.0).with_idle("waits")
    assert [(s.start, s.end) for s in timeline if s.stream == "idle"] == [(2.75, 3.0), (6.0, 8.0)]
    assert timeline.busy("idle") == 2.25


def test_columns_and_spans_are_the_same_thing():
    timeline = planted(rank=3)
    assert list(timeline) == PLANTED
    assert timeline.seconds == 6.0
    assert timeline.names.count("gather") == 1
    assert timeline.stream.dtype == np.int8


@pytest.mark.parametrize(
    ("span", "seconds"),
    [
        (Span("computer", 0, 1, "x"), None),
        (Span("compute", 1, 0, "x"), None),
        (Span("compute", 0, 2, "x"), 1.0),
        (Span("compute", -1, 2, "x"), None),
    ],
)
def test_impossible_spans_are_refused(span, seconds):
    with pytest.raises(ValueError, match="unknown stream|ends before"):
        Timeline.build([span], seconds=seconds)


def test_an_empty_timeline_is_idle():
    timeline = Timeline.build([], seconds=2.0)
    assert timeline.idle("compute") == 2.0
    assert timeline.with_idle().busy("idle") == 2.0
    assert "2.000 s" in draw(timeline.with_idle(), 20)


def test_shares_of_bins():
    cover = planted().covered("compute")
    assert shares(cover, [0.0, 1.0, 3.0, 4.5, 6.0]).tolist() == [1.0, 0.5, 1.0, pytest.approx(1 / 3)]


def test_comparison_names_every_stream_of_either():
    other = Timeline.build([Span("compute", 0, 3, "all"), Span("pipeline", 2, 4, "receive")])
    changes = {change.stream: change for change in compare_timelines(planted(), other)}
    assert list(changes) == ["compute", "all_gather", "reduce_scatter", "tensor", "pipeline"]
    assert changes["compute"].busy == (4.0, 3.0)
    assert changes["pipeline"].exposed == (0.0, 1.0)


def test_drawn_lines_have_one_width_and_name_every_stream():
    lines = draw(planted(seconds=8.0), width=16).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["compute", "all_gather", "reduce_scatter", "tensor"]
    cells = [line.split("│")[1] for line in lines[:-1]]
    assert {len(cell) for cell in cells} == {16}
    assert cells[0] == "████  ████      "
    assert "1.000 exposed" in lines[2]


def test_chrome_trace_holds_every_span_in_microseconds():
    document = json.loads(json.dumps(to_chrome([planted(rank=5), planted(rank=6)])))
    spans = [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == 5]
    assert [(event["name"], event["ts"], event["dur"]) for event in spans][2] == ("gather", 1e6, 1.5e6)
    threads = {
        event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"
    }
    assert {threads[event["tid"]] for event in spans} == {"compute", "all_gather", "reduce_scatter", "tensor"}
    assert len(spans) == len(PLANTED)


def test_schedule_picture_is_well_formed_and_numbers_what_has_room():
    rows = [
        [Box("F", 0, 0, 0, 1), Box("B", 0, 0, 3, 5)],
        [Box("F", 0, 0, 1, 2), Box("I", 0, 0, 2, 2.9), Box("W", 0, 0, 2.9, 2.901)],
    ]
    root = ET.fromstring(schedule_svg(rows, title="1f1b <&>"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = [item for item in root.iter(f"{space}rect") if item.find(f"{space}title") is not None]
    assert len(boxes) == 5
    words = [item.text for item in root.iter(f"{space}text")]
    assert words.count("0") == 4  # the sliver has no room
    assert {"rank 0", "rank 1", "forward", "backward", "1f1b <&>"} <= set(words)
    with pytest.raises(ValueError, match="cannot be drawn"):
        schedule_svg([[]])
