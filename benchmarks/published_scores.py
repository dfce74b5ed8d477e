"""From rows to scores: errors by source, OOM labels, and how well layouts are ranked."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from benchmarks.published_memory import Scored, score
from benchmarks.published_nouns import Row, Unusable
from benchmarks.published_rows import CALIBRATION, source_of
from benchmarks.published_schema import check
from benchmarks.published_time import Timed, time_rows

LEAST_ROWS = 5  # of a source that counts in the overall figures
LEAST_SWEEP = 3
METHODS = ("constant_mfu", "nearest_row")
QUANTITIES = ("time", "memory_allocated", "memory_reserved")


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in layout only."""

    source: str
    name: str
    rows: int
    tau: float
    regret: float  # measured time of the layout that is predicted fastest, over the fastest measured, less 1


@dataclass(frozen=True)
class Scores:
    timed: list[Timed]
    memory: list[Scored]
    oom: dict[str, int]
    sweeps: list[Sweep]
    unusable: dict[str, str]  # reason by "id (time|memory)"

    def report(self) -> dict[str, Any]:
        """The JSON document: figures in percent; n counts rows."""
        errors = self._errors()
        sources = sorted({source for by_source in errors.values() for source in by_source})
        by_source: dict[str, Any] = {}
        for source in sources:
            half = "calibration" if source in CALIBRATION else "held-out"
            by_source[source] = {"half": half} | {
                quantity: summary(errors[quantity][source]) for quantity in QUANTITIES if source in errors[quantity]
            }
            mine = [sweep for sweep in self.sweeps if sweep.source == source]
            if mine:
                by_source[source]["regret"] = regret_summary(mine)
        overall: dict[str, Any] = {quantity: macro_average(errors[quantity]) for quantity in QUANTITIES}
        overall |= {"oom": self.oom, "regret": regret_summary(self.sweeps)}
        return {
            "overall": overall,
            "by_source": by_source,
            "halves": {
                half: {quantity: macro_average(_half(errors[quantity], half)) for quantity in QUANTITIES}
                for half in ("calibration", "held-out")
            },
            "baselines": {
                method: {
                    "overall": macro_average(errors[method]),
                    "by_source": {source: summary(values) for source, values in sorted(errors[method].items())},
                }
                for method in METHODS
            },
            "unusable": dict(sorted(Counter(self.unusable.values()).items())),
        }

    def _errors(self) -> dict[str, dict[str, list[float]]]:
        """Signed relative errors by quantity or method, then by source."""
        errors: dict[str, dict[str, list[float]]] = {key: defaultdict(list) for key in (*QUANTITIES, *METHODS)}
        for item in self.timed:
            for method, error in item.errors().items():
                errors["time" if method == "planner" else method][item.source].append(error)
        for scored in self.memory:
            errors[f"memory_{scored.quantity}"][scored.source].append(scored.error)
        return errors


def score_rows(rows: list[Row]) -> Scores:
    unusable = {row["id"]: f"not scored: {why}" for row in rows if (why := _only_listed(row))}
    kept = [row for row in rows if row["id"] not in unusable]
    timed, without_time = time_rows([row for row in kept if row.get("set") != "memory-ci" and not _is_oom(row)])
    memory, without_memory, oom = score(kept)
    unusable |= {f"{key} (time)": f"time: {why}" for key, why in without_time.items()}
    unusable |= {f"{key} (memory)": f"memory: {why}" for key, why in without_memory.items()}
    return Scores(timed, memory, oom, find_sweeps(timed), unusable)


def _only_listed(row: Row) -> str | None:
    """Why a row is not scored at all."""
    if row.get("quality") == "C":
        return "quality C"
    if row.get("set") == "memory-ci-tiny":
        return "memory-ci-tiny"
    try:
        check(row)
    except Unusable as reason:
        return str(reason)
    return None


def _is_oom(row: Row) -> bool:
    return bool(row["measured"].get("oom"))


def percentile(values: list[float], share: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[math.ceil(place)] - ordered[low])


def summary(errors: list[float]) -> dict[str, float]:
    absolute = [abs(error) for error in errors]
    return {
        "n": len(errors),
        "median_abs_pct": 100 * statistics.median(absolute),
        "p90_abs_pct": 100 * percentile(absolute, 0.9),
        "bias_pct": 100 * statistics.median(errors),
    }


def macro_average(by_source: dict[str, list[float]]) -> dict[str, float | None]:
    """Mean over the sources with enough rows of each one's figure; n counts their rows."""
    figures = [summary(errors) for errors in by_source.values() if len(errors) >= LEAST_ROWS]
    names = ("median_abs_pct", "p90_abs_pct", "bias_pct")
    means = {name: statistics.mean(f[name] for f in figures) if figures else None for name in names}
    return {"n": sum(int(figure["n"]) for figure in figures), **means}


def _half(by_source: dict[str, list[float]], half: str) -> dict[str, list[float]]:
    return {source: v for source, v in by_source.items() if (source in CALIBRATION) == (half == "calibration")}


def find_sweeps(timed: list[Timed]) -> list[Sweep]:
    """Groups of at least 3 rows with the same source, software version, model, sequence, batch, chip, number of GPUs
    and precision, in at least 2 layouts."""
    groups: dict[tuple[object, ...], list[Timed]] = defaultdict(list)
    for item in timed:
        layout, hardware = item.row["layout"], item.row["hardware"]
        model = item.subject.model.model_copy(update={"name": ""}).model_dump_json()
        key = (item.source, layout["framework"], model, item.row["model"]["seq"], layout["global_batch"],
               hardware["gpu"], hardware["gpus"], layout["precision"])  # fmt: skip
        groups[key].append(item)
    sweeps = []
    for items in groups.values():
        if len(items) < LEAST_SWEEP or len({item.step.seconds for item in items}) < 2:
            continue
        predicted, measured = [item.step.seconds for item in items], [item.measured for item in items]
        first = items[0]
        name = f"{first.row['model']['name']} on {first.row['hardware']['gpus']} {first.row['hardware']['gpu']}"
        chosen = measured[predicted.index(min(predicted))]
        sweeps.append(
            Sweep(first.source, name, len(items), kendall_tau(predicted, measured), chosen / min(measured) - 1)
        )
    return sweeps


def kendall_tau(xs: list[float], ys: list[float]) -> float:
    """τ-b, which allows for ties; 0 where either list is constant."""
    balance = pairs_x = pairs_y = 0
    for (x1, y1), (x2, y2) in itertools.combinations(zip(xs, ys, strict=True), 2):
        x, y = (x1 > x2) - (x1 < x2), (y1 > y2) - (y1 < y2)
        balance, pairs_x, pairs_y = balance + x * y, pairs_x + abs(x), pairs_y + abs(y)
    return balance / math.sqrt(pairs_x * pairs_y) if pairs_x and pairs_y else 0.0


def regret_summary(sweeps: list[Sweep]) -> dict[str, float | None]:
    regrets = [100 * sweep.regret for sweep in sweeps]
    return {
        "sweeps": len(sweeps),
        "median_pct": statistics.median(regrets) if regrets else None,
        "max_pct": max(regrets, default=None),
        "kendall_tau": statistics.mean(sweep.tau for sweep in sweeps) if sweeps else None,
    }


def worst_groups(timed: list[Timed], count: int) -> list[tuple[str, str, str, str, list[Timed]]]:
    """(source, model, chip, dtype, rows) of the largest median errors."""
    groups: dict[tuple[str, str, str, str], list[Timed]] = defaultdict(list)
    for item in timed:
        chip = item.subject.cluster.gpu.name
        groups[source_of(item.row), item.row["model"]["name"], chip, item.subject.dtype].append(item)
    ordered = sorted(groups.items(), key=lambda pair: -abs(median_error(pair[1])))
    return [(*key, items) for key, items in ordered[:count]]


def median_error(items: list[Timed]) -> float:
    return statistics.median(item.errors()["planner"] for item in items)
