"""Score predicted memory on runs that others published.

python -m benchmarks.published_memory ../shared/data/published_runs.jsonl [--verbose] [--json]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published_rows import Row, Unusable, gpu_of, source_of, subject_of

from shardwise.planner.memory import capacity_bytes, predict_memory, verdict
from shardwise.planner.subject import Subject
from shardwise.spec import Layout
from shardwise.spec.memory import Memory

GB = 1e9


@dataclass(frozen=True)
class Scored:
    """One row: what was measured and predicted, in bytes, of one quantity."""

    id: str
    source: str
    quantity: str  # "allocated" or "reserved" (which includes nvidia-smi's used)
    measured: float
    predicted: float
    verdict: str
    memory: Memory

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def memory_subject_of(row: Row) -> Subject:
    """The row's Subject with what only memory depends on: recompute policy, compile, gradient type. Raises Unusable."""
    row = _completed(row)
    subject = subject_of(row)
    layout, framework = row["layout"], (row["layout"]["framework"] or "").lower()
    precision = (layout["precision"] or "bf16").lower()
    changes: dict[str, Any] = {"recompute": _recompute(layout.get("recompute")), "compile": bool(layout.get("compile"))}
    local = re.match(r"local batch (\d+)", layout.get("other") or "")
    micro_batches = subject.micro_batches
    if (
        local and layout["pp"] > 1
    ):  # torchtitan cuts it into as many micro-batches as pipeline ranks unless told otherwise
        changes["micro_batch"] = int(local[1]) // layout["pp"]
        micro_batches = layout["pp"]
    gradient_bytes = 2 if "nemo" in framework or precision.startswith("fp16") else 4
    if "deepspeed" in framework and precision.startswith("bf16"):
        gradient_bytes = 6  # bf16 gradients beside the fp32 ones that accumulate
    return replace(
        subject,
        stack=replace(subject.stack, name=_family(row, subject.stack.name)),
        layout=Layout.model_validate({**subject.layout.dump(), **changes}),
        gradient_bytes=gradient_bytes,
        micro_batches=micro_batches,
    )


def _family(row: Row, name: str) -> str:
    """The memory family of a software version."""
    if "2024" in row["layout"]["framework"] and name == "torchtitan":
        return "torchtitan-2024"
    unfused = '"attention-backend": "unfused"' in (row["layout"].get("other") or "")
    return f"{name}-unfused" if unfused else name


def _completed(row: Row) -> Row:
    """The row with what it leaves out and memory can do without: a vocabulary that only the command line names, heads
    (no part of a fully recomputed block depends on them), layers that follow from the parameter count."""
    model, layout, hardware = dict(row["model"]), row["layout"], row["hardware"]
    if hardware["gpus"] is None:
        raise Unusable("number of GPUs not stated")
    if layout["pp"] is None:
        raise Unusable("pp not stated")
    if found := re.search(r"vocab-size=(\d+) make-divisible=(\d+)", model.get("other") or ""):
        vocabulary, multiple = int(found[1]), int(found[2]) * (layout["tp"] or 1)
        model["vocab"] = -(-vocabulary // multiple) * multiple
    if row["source"].get("repo") and source_of(row) == "bloom":
        model["vocab"] = model["vocab"] or 250880
    if not model["heads"] and model["hidden"]:
        model["heads"] = max(heads for heads in (48, 64, 72) if model["hidden"] % heads == 0)
    if not model["layers"] and model.get("params") and model["hidden"]:
        matrices = model["params"] - model["vocab"] * model["hidden"]
        model["layers"] = round(matrices / (12 * model["hidden"] ** 2) / layout["pp"]) * layout["pp"]
    return {**row, "model": model}


def _recompute(text: str | None) -> str:
    name = (text or "none").lower()
    return "full" if name.startswith("full") else "selective" if name.startswith("selective") else "none"


def score_row(row: Row) -> Scored:
    """Raises Unusable."""
    what, subject = row["measured"]["memory_what"] or "", None
    subject = memory_subject_of(row)
    last = "LAST" in what
    memory = predict_memory(subject, subject.layout.pp - 1 if last else None)
    allocated = "allocated" in what
    answer = verdict(memory, gpu_of(row))
    counters = {"allocated": memory.live, "nvidia-smi": memory.used[1]}
    predicted = next((value for name, value in counters.items() if name in what), memory.reserved[1])
    if not allocated and answer != "oom":  # near the limit the allocator gives back what it does not need
        predicted = min(predicted, capacity_bytes(gpu_of(row)))
    return Scored(
        id=row["id"],
        source=source_of(row),
        quantity="allocated" if allocated else "reserved",
        measured=row["measured"]["memory_gb"] * GB,
        predicted=predicted,
        verdict=answer,
        memory=memory,
    )


def score(rows: list[Row]) -> tuple[list[Scored], dict[str, str], dict[str, int]]:
    """Scored rows, reasons by id of the others that name a memory, and OOM labels: n, false fits, false OOMs."""
    scored, unusable = [], {}
    oom = {"n": 0, "false_fits": 0, "measured": 0, "false_ooms": 0}
    for row in rows:
        measured = row["measured"]
        if not (measured["memory_gb"] or measured["oom"]):
            continue
        if row["quality"] == "C" or row["set"] == "memory-ci-tiny":
            unusable[row["id"]] = "listed, not scored"
            continue
        try:
            if measured["oom"]:
                subject = memory_subject_of(row)
                answer = verdict(predict_memory(subject), gpu_of(row))
                oom["n"] += 1
                oom["false_fits"] += answer != "oom"
                continue
            scored.append(score_row(row))
        except (Unusable, ValueError) as reason:
            unusable[row["id"]] = str(reason)
    oom["measured"] = len(scored)
    oom["false_ooms"] = sum(item.verdict == "oom" for item in scored)
    return scored, unusable, oom


def summary(errors: list[float]) -> dict[str, float]:
    absolute = sorted(map(abs, errors))
    return {
        "n": len(errors),
        "median_abs_pct": 100 * statistics.median(absolute),
        "p90_abs_pct": 100 * absolute[int(0.9 * (len(absolute) - 1))],
        "bias_pct": 100 * statistics.median(errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.file.read_text().splitlines()]
    scored, unusable, oom = score(rows)
    groups: dict[str, list[float]] = defaultdict(list)
    for item in scored:
        groups[f"{item.quantity} {item.source}"].append(item.error)
        groups[item.quantity].append(item.error)
        if arguments.verbose:
            parts = {k: round(v, 1) for k, v in item.memory.dump()["parts_gib"].items() if v > 0.05}
            print(f"{item.error:+.1%} {item.measured / GB:.1f} {item.predicted / GB:.1f} {item.verdict} {item.id}")
            print(f"      {item.memory.event} stage {item.memory.stage} live {item.memory.live / 2**30:.1f} {parts}")
    result: dict[str, Any] = {key: summary(errors) for key, errors in sorted(groups.items())}
    result |= {"oom": oom, "unusable": dict(Counter(unusable.values()))}
    if arguments.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(key, {k: round(v, 1) if isinstance(v, float) else v for k, v in value.items()})
    if arguments.verbose:
        print(json.dumps(unusable, indent=0))


if __name__ == "__main__":
    main()
