"""Which charts the page shows."""

from __future__ import annotations

import dataclasses

import numpy as np

from shardwise.report.chart import GROUPS, POINTS, Chart, Series
from shardwise.report.results import Column, Results, number
from shardwise.report.ticks import short

_SETTLED = 0.1  # share of the steps after which a closer look at the loss begins
_WORTH_IT = 2.5  # how much larger the whole range of the loss must be than that of the closer look


def charts(results: Results) -> str:
    """All charts, empty where no step was recorded."""
    steps = results.steps
    if not len(steps["step"]):
        return ""
    last = steps["step"][-1]
    resumed = [event["step"] for event in results.events if event.get("event") == "resume" and event["step"] < last]

    def line(label: str, name: str, style: str = "train") -> Series:
        return Series(label, steps["step"], steps[name], style)

    loss = Chart("Loss", "nats per token", _loss(results), wide=True)
    found = [
        loss,
        *_closer(loss),
        Chart("Learning rate", "", [line("learning rate", "lr")], from_zero=True),
        Chart("Gradient norm", "before clipping", [line("gradient norm", "grad_norm")], may_be_log=True),
        Chart("Throughput", "tokens/s, all ranks", [line("throughput", "tokens_per_second")], from_zero=True),
        Chart(
            "Memory",
            "GiB, peak so far on rank 0",
            [line("peak memory", "peak_memory_gib")],
            from_zero=True,
        ),
    ]
    figures = "".join(dataclasses.replace(chart, marks=resumed).html() for chart in found)
    return f'<section class="charts"><h2>Curves</h2><p>{_key(results, resumed)}</p>{figures}</section>'


def _key(results: Results, resumed: list[float]) -> str:
    """How to read all of the charts."""
    sentences = []
    if results.run and results.run.recipe.batch_tokens:
        sentences.append(f"A step is {short(results.run.recipe.batch_tokens)} tokens.")
    if (steps := len(results.steps["step"])) > POINTS:
        sentences.append(f"Lines are means of {steps / GROUPS:.0f} steps, areas reach from the lowest to the highest.")
    if resumed:
        named = ", ".join(f"{step:,.0f}" for step in resumed[:5]) + (", …" if len(resumed) > 5 else "")
        sentences.append(f"Dashes: the run was resumed after step {named}.")
    return " ".join(sentences)


def _loss(results: Results) -> list[Series]:
    """Training, and validation: coloured by whether it was in its band, where there was one."""
    series = [Series("training", results.steps["step"], results.steps["loss"])]
    evaluations = results.evaluations
    expected = [record for record in evaluations if isinstance(record.get("inside"), bool)]
    if expected:
        series.append(
            Series(
                "expected", _column(expected, "step"), _column(expected, "expected_loss"), "none", dots=True,
                spread=_column(expected, "tolerance"),
            )
        )  # fmt: skip
    outside = [record for record in expected if record["inside"] is False]
    others = [record for record in evaluations if record.get("inside") is not False]
    for label, records, style in (("validation", others, "validation"), ("validation, OUTSIDE", outside, "outside")):
        if records:
            series.append(Series(label, _column(records, "step"), _column(records, "loss"), style, dots=True))
    return series


def _closer(chart: Chart) -> list[Chart]:
    """The same chart without its first tenth, where that makes what follows easier to see."""
    training = chart.series[0]
    first = training.x[0] + _SETTLED * (training.x[-1] - training.x[0])
    late = [_after(series, first) for series in chart.series]
    values = training.y[np.isfinite(training.y)], late[0].y[np.isfinite(late[0].y)]
    if len(values[1]) < 50 or np.ptp(values[0]) < _WORTH_IT * np.ptp(values[1]):
        return []
    return [dataclasses.replace(chart, title=f"Loss from step {late[0].x[0]:,.0f} on", series=late)]


def _after(series: Series, first: float) -> Series:
    kept = series.x >= first
    spread = series.spread[kept] if series.spread is not None else None
    return dataclasses.replace(series, x=series.x[kept], y=series.y[kept], spread=spread)


def _column(records: list[dict[str, object]], key: str) -> Column:
    values = [number(record, key) for record in records]
    return np.array([np.nan if value is None else value for value in values])
