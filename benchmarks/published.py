"""Score the planner on runs that others published; nothing that a row measured enters its prediction.

python -m benchmarks.published ../shared/data/published_runs.jsonl [--json] [--page docs/accuracy.md] [--verbose]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.marked import own_part
from benchmarks.published_page import page
from benchmarks.published_schema import read_rows
from benchmarks.published_scores import QUANTITIES, Scores, score_rows

from shardwise.spec import InputError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="published runs, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--page", type=Path, help="write docs/accuracy.md here")
    parser.add_argument("--verbose", action="store_true", help="every row's error and where the predicted time goes")
    arguments = parser.parse_args()
    try:
        scores = score_rows(read_rows(arguments.file))
        if arguments.page:
            _write(arguments.page, page(scores, arguments.file.name) + own_part(arguments.page))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = scores.report()
    if arguments.json:
        print(json.dumps(report))
        return 0
    if arguments.verbose:
        _print_rows(scores)
    _print_report(report)
    return 0


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"--page {path}: cannot be written ({error.strerror})") from None


def _print_rows(scores: Scores) -> None:
    for item in scores.timed:
        step = item.step
        parts = {name: f"{s / step.seconds:.0%}" for name, s in step.parts.items() if s > 0.01 * step.seconds}
        print(f"time {item.errors()['planner']:+7.1%} {item.measured:9.3f} s {item.row['id']} {parts}")
    for scored in scores.memory:
        print(f"{scored.quantity} {scored.error:+7.1%} {scored.measured / 1e9:6.1f} GB {scored.verdict} {scored.id}")
    for key, why in scores.unusable.items():
        print(f"unusable {key}: {why}")


def _print_report(report: dict[str, Any]) -> None:
    def line(name: str, figures: dict[str, Any]) -> None:
        if figures["n"]:
            print(f"{name:32} n {figures['n']:4}  median {figures['median_abs_pct']:5.1f} %  "
                  f"p90 {figures['p90_abs_pct']:5.1f} %  bias {figures['bias_pct']:+6.1f} %")  # fmt: skip

    for source, values in report["by_source"].items():
        for quantity in QUANTITIES:
            if quantity in values:
                line(f"{source} {quantity} ({values['half']})", values[quantity])
    for half, values in report["halves"].items():
        for quantity in QUANTITIES:
            line(f"{half}: {quantity}", values[quantity])
    for quantity in QUANTITIES:
        line(f"overall: {quantity}", report["overall"][quantity])
    for method, values in report["baselines"].items():
        line(f"baseline: {method}", values["overall"])
    print("oom", report["overall"]["oom"])
    print("regret", {k: round(v, 2) if v is not None else None for k, v in report["overall"]["regret"].items()})
    for reason, count in report["unusable"].items():
        print(f"{count:4} {reason}")


if __name__ == "__main__":
    sys.exit(main())
