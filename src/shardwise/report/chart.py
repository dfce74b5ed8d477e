"""Charts as inline SVG. The SVG is stretched to the width that there is; all text stands beside it as HTML, so that it
keeps its size on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from shardwise.report.results import Column
from shardwise.report.ticks import linear_ticks, log_ticks, short, tick_labels

POINTS = 800  # the most that one series draws
GROUPS = POINTS // 3  # each a mean, a lowest and a highest
_MANY_DOTS = 40  # from here on they are drawn smaller
_SIZE = 1000  # of the viewBox, both ways
_LOG_FROM = 30.0  # highest / lowest from which a logarithmic axis reads better


@dataclass(frozen=True)
class Series:
    """Numbers over steps; NaN leaves a gap. `style` is a class of page.css."""

    label: str
    x: Column
    y: Column
    style: str = "train"
    dots: bool = False  # marks instead of a line
    spread: Column | None = None  # dots only: draw y ± spread as a bar


@dataclass(frozen=True)
class Chart:
    """One figure. `marks` are steps to draw a dashed line at."""

    title: str
    unit: str
    series: Sequence[Series]
    marks: Sequence[float] = ()
    from_zero: bool = False
    may_be_log: bool = False
    wide: bool = False

    def html(self) -> str:
        """A <figure>."""
        shown = [series for series in self.series if np.isfinite(series.y).any()]
        start = f'<figure class="chart{" wide" if self.wide else ""}"><figcaption>{escape(self.title)} <span>'
        if not shown:
            return f"{start}{escape(self.unit)}</span></figcaption><p>no numbers were recorded</p></figure>"
        x_axis = _Axis.over([series.x[np.isfinite(series.y)] for series in shown])
        reach = [series.y for series in shown]
        reach += [series.y + sign * series.spread for series in shown if series.spread is not None for sign in (-1, 1)]
        log = self.may_be_log and _spans_decades(reach)
        y_axis = _Axis.over(reach, from_zero=self.from_zero, log=log, margin=0.05)
        x_ticks, y_ticks = [tick for tick in x_axis.ticks(5) if tick == round(tick)], y_axis.ticks(5)
        x_labels, y_labels = tick_labels(x_ticks), [short(t) for t in y_ticks] if log else tick_labels(y_ticks)
        gutter = max(map(len, y_labels), default=1) + 1

        curves = [curve for series in shown for curve in _curves(series, x_axis, y_axis)]
        marks = [mark for mark in self.marks if x_axis.low <= mark <= x_axis.high]
        text = escape(_describe(self.title, self.unit, shown))
        parts = [
            f"{start}{escape(self.unit)}{', logarithmic' if log else ''}</span></figcaption>{_legend(shown)}",
            f'<div class="plot" style="--gutter:{gutter}ch">',
            '<div class="y" aria-hidden="true">',
            *(
                f'<span style="bottom:{y_axis.place(tick) / 10:.1f}%">{label}</span>'
                for tick, label in zip(y_ticks, y_labels, strict=True)
            ),
            "</div>",
            f'<svg role="img" viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" aria-label="{text}">',
            f"<title>{text}</title>",
            _path("grid", "".join(f"M0 {_SIZE - y_axis.place(tick):.0f}H{_SIZE}" for tick in y_ticks)),
            _path("mark", "".join(f"M{x_axis.place(mark):.0f} 0V{_SIZE}" for mark in marks)),
            *curves,
            "</svg>",
            '<div class="x" aria-hidden="true">',
            *(_x_label(x_axis.place(tick) / 10, label) for tick, label in zip(x_ticks, x_labels, strict=True)),
            "</div></div>",
            '<p class="axis">step</p></figure>',
        ]
        return "".join(parts)


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool = False

    @classmethod
    def over(
        cls, values: Sequence[Column], *, from_zero: bool = False, log: bool = False, margin: float = 0.0
    ) -> _Axis:
        together = np.concatenate(values)
        together = together[np.isfinite(together) & ((together > 0) if log else True)]
        low, high = float(together.min()), float(together.max())
        if log:
            return cls(low / 1.2, high * 1.2, log=True)
        if from_zero:
            low = min(low, 0.0)
        if high == low:
            low, high = low - (abs(low) * 0.05 or 1.0), high + (abs(high) * 0.05 or 1.0)
        room = margin * (high - low)
        return cls(low if from_zero else low - room, high + room)

    def place(self, value: float) -> float:
        """Position along the axis, 0 … _SIZE."""
        return float(self.places(np.array([value]))[0])

    def places(self, values: Column) -> Column:
        low, high = self.low, self.high
        if self.log:
            with np.errstate(invalid="ignore", divide="ignore"):
                values = np.where(values > 0, np.log10(values), np.nan)
            low, high = np.log10(low), np.log10(high)
        return (values - low) / (high - low) * _SIZE

    def ticks(self, most: int) -> list[float]:
        return log_ticks(self.low, self.high, most) if self.log else linear_ticks(self.low, self.high, most)


def thin(x: Column, y: Column) -> tuple[Column, Column, Column, Column]:
    """x, mean, lowest and highest y of GROUPS runs of neighbours; unchanged where there are at most POINTS.

    So a spike of one step stays visible among thousands. All of a group unknown: NaN.
    """
    if len(x) <= POINTS:
        return x, y, y, y
    edges = np.linspace(0, len(x), GROUPS + 1).astype(int)[:-1]
    known = np.isfinite(y)
    counts = np.add.reduceat(known, edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, y, 0.0), edges) / counts
        middle = np.add.reduceat(x, edges) / np.diff([*edges, len(x)])
    low = np.minimum.reduceat(np.where(known, y, np.inf), edges)
    high = np.maximum.reduceat(np.where(known, y, -np.inf), edges)
    return middle, mean, np.where(counts > 0, low, np.nan), np.where(counts > 0, high, np.nan)


def _curves(series: Series, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    if series.dots or np.isfinite(series.y).sum() == 1:
        x, y = x_axis.places(series.x), _SIZE - y_axis.places(series.y)
        drawn = []
        if series.spread is not None:
            tops, feet = (y_axis.places(series.y + sign * series.spread) for sign in (1, -1))
            bars = zip(x, tops, feet, strict=True)
            drawn.append(_path("spread", "".join(f"M{a:.0f} {_SIZE - t:.1f}V{_SIZE - f:.1f}" for a, t, f in bars)))
        dots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(x, y, strict=True) if np.isfinite(b))
        many = " many" if len(x) > _MANY_DOTS else ""
        return [*drawn, _path(f"dots {series.style}{many}", dots)]
    middle, mean, low, high = thin(series.x, series.y)
    x = x_axis.places(middle)
    drawn = []
    if len(middle) < len(series.x):
        known = np.isfinite(low)
        upper = _points(x[known], _SIZE - y_axis.places(high[known]))
        lower = _points(x[known], _SIZE - y_axis.places(low[known]))
        drawn.append(_path(f"range {series.style}", "M" + "L".join([*upper, *reversed(lower)]) + "Z"))
    return [*drawn, _path(f"line {series.style}", _line(x, _SIZE - y_axis.places(mean)))]


def _line(x: Column, y: Column) -> str:
    """Path through the points, broken where y is unknown; a point by itself becomes a dot."""
    words, gap = [], True
    for a, b in zip(x, y, strict=True):
        if np.isfinite(b):
            words.append(f"{'M' if gap else 'L'}{a:.1f} {b:.1f}" + ("h0" if gap else ""))
        gap = not np.isfinite(b)
    return "".join(words)


def _points(x: Column, y: Column) -> list[str]:
    return [f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True)]


def _path(style: str, path: str) -> str:
    return f'<path class="{style}" d="{path}"/>' if path else ""


def _x_label(percent: float, label: str) -> str:
    shift = "" if 8 <= percent <= 92 else f";transform:translateX({'0' if percent < 8 else '-100%'})"
    return f'<span style="left:{percent:.1f}%{shift}">{label}</span>'


def _legend(shown: Sequence[Series]) -> str:
    if len(shown) < 2:
        return ""
    keys = [
        ("bar" if series.spread is not None else f"{'dot' if series.dots else 'stroke'} {series.style}", series.label)
        for series in shown
    ]
    return '<ul class="legend">' + "".join(f'<li><i class="{k}"></i>{escape(text)}</li>' for k, text in keys) + "</ul>"


def _describe(title: str, unit: str, shown: Sequence[Series]) -> str:
    """The chart in words, for those who cannot see it."""
    sentences = []
    for series in shown:
        known = np.isfinite(series.y)
        x, y = series.x[known], series.y[known]
        low, high = int(y.argmin()), int(y.argmax())
        sentences.append(
            f"{series.label}: {short(y[0])} at step {x[0]:,.0f}, {short(y[-1])} at step {x[-1]:,.0f}, "
            f"lowest {short(y[low])} at step {x[low]:,.0f}, highest {short(y[high])} at step {x[high]:,.0f}"
        )
    return f"{title}, {unit}, over steps. " + ". ".join(sentences) + "."


def _spans_decades(values: Sequence[Column]) -> bool:
    together = np.concatenate(values)
    together = together[np.isfinite(together)]
    return bool(together.min() > 0 and together.max() / together.min() > _LOG_FROM)
