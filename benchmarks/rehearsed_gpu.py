"""24 Runs on one GPU, each as one rank of its world: memory and time, beside what needs no GPU to say.

    python -m benchmarks.rehearsed_gpu measure FILE [--only TEXT]          on the GPU: `rehearse --device cuda` of each
    python -m benchmarks.rehearsed_gpu fits FILE                           there too: one-step tries near its memory
    python -m benchmarks.rehearsed_gpu judge FILE                           what is said of those tries, anywhere
    python -m benchmarks.rehearsed_gpu compare FILE [--cluster CLUSTER] [--page docs/accuracy.md]      anywhere

`compare` rehearses the same Runs on the CPU and asks the planner for memory and, with a Cluster file that `calibrate`
wrote on that GPU, for time. None of the Runs calibrates anything. Exchanges do nothing, so they are left out of the
prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from benchmarks.marked import write_marked

from shardwise.planner.alone import alone_seconds
from shardwise.planner.memory import predict_memory, verdict
from shardwise.planner.memory.fit import capacity_bytes
from shardwise.rehearsal.child import in_children
from shardwise.rehearsal.gpu import on_gpu
from shardwise.rehearsal.rank import on_cpu
from shardwise.spec import Cluster, InputError, Layout, Run
from shardwise.spec.memory import GIB, PARTS, Memory
from shardwise.verbs.rehearse import subject_of_run, verdict_of

STEPS = 4
GPT2 = {"preset": "gpt2-124m", "vocabulary": 50304}
MEDIUM = {"preset": "gpt2-350m", "vocabulary": 50304}
LLAMA = {"preset": "llama3-8b", "layers": 8}
QWEN = {"preset": "qwen3-8b", "layers": 8}
EXPERTS = {"preset": "qwen3-30b-a3b", "layers": 6}
MIXTRAL = {"preset": "mixtral-8x7b", "layers": 4}


@dataclasses.dataclass(frozen=True)
class Case:
    """`stage`: pipeline rank; of those that share it the first is run."""

    model: Any
    sequence: int
    micro_batches: int
    layout: dict[str, Any]
    stage: int = 0

    def run(self, cluster: dict[str, Any] | None = None) -> Run:
        layout = Layout.load(self.layout)
        tokens = self.sequence * layout.micro_batch * self.micro_batches * layout.data_ranks
        given = cluster or {"gpu": "h200-sxm"}
        return Run.load(
            {
                "model": self.model,
                "cluster": {**given, "gpus": layout.world, "gpus_per_node": min(8, layout.world)},
                "layout": layout,
                "recipe": {"sequence": self.sequence, "batch_tokens": tokens, "steps": STEPS},
            }
        )

    @property
    def rank(self) -> int:
        layout = Layout.load(self.layout)
        return self.stage * layout.world // layout.pp


CASES: dict[str, Case] = {
    "gpt2 124M, one rank": Case(GPT2, 1024, 2, {"zero": 0, "micro_batch": 16}),
    "gpt2 350M, FSDP 8": Case(MEDIUM, 1024, 1, {"dp_shard": 8, "micro_batch": 16}),
    "llama 1B, FSDP 8": Case("llama3.2-1b", 4096, 1, {"dp_shard": 8, "micro_batch": 4}),
    "llama 1B, FSDP 64 zero 2, accumulated": Case(
        "llama3.2-1b", 4096, 3, {"dp_shard": 64, "zero": 2, "micro_batch": 2}
    ),
    "llama 1B, HSDP 4 × 16, chunked loss": Case(
        "llama3.2-1b", 8192, 1, {"dp_replicate": 4, "dp_shard": 16, "micro_batch": 2, "loss": "chunked"}
    ),
    "llama 1B, DDP 8": Case("llama3.2-1b", 4096, 1, {"dp_replicate": 8, "zero": 0, "micro_batch": 2}),
    "llama 1B, ZeRO-1 8": Case("llama3.2-1b", 4096, 2, {"dp_shard": 8, "zero": 1, "micro_batch": 2}),
    "8B × 8, FSDP 64": Case(LLAMA, 8192, 1, {"dp_shard": 64}),
    "8B, FSDP 256, full recompute": Case(
        "llama3-8b", 8192, 1, {"dp_shard": 256, "micro_batch": 2, "recompute": "full"}
    ),
    "8B × 8, FSDP 1024, selective": Case(
        LLAMA, 8192, 1, {"dp_shard": 1024, "micro_batch": 2, "recompute": "selective"}
    ),
    "8B × 8, FSDP 64, sqrt, accumulated": Case(LLAMA, 8192, 2, {"dp_shard": 64, "recompute": "sqrt"}),
    "qwen3 8B × 8, FSDP 32": Case(QWEN, 4096, 1, {"dp_shard": 32, "micro_batch": 2}),
    "8B × 8, FSDP 16 × TP 4": Case(LLAMA, 8192, 1, {"dp_shard": 16, "tp": 4, "micro_batch": 4}),
    "8B, FSDP 8 × TP 8": Case("llama3-8b", 8192, 1, {"dp_shard": 8, "tp": 8, "micro_batch": 4}),
    "8B × 8, FSDP 16 × CP 4, all-gather": Case(LLAMA, 16384, 1, {"dp_shard": 16, "cp": 4, "micro_batch": 2}),
    "8B, FSDP 16 × PP 4, 1F1B, first": Case("llama3-8b", 8192, 8, {"dp_shard": 16, "pp": 4, "zero": 2}),
    "8B, FSDP 16 × PP 4, interleaved, last": Case(
        "llama3-8b", 8192, 8, {"dp_shard": 16, "pp": 4, "zero": 2, "schedule": "interleaved", "virtual_stages": 2}, 3
    ),
    "qwen3 30B × 6, FSDP 64": Case(EXPERTS, 4096, 1, {"dp_shard": 64, "micro_batch": 4}),
    "qwen3 30B × 6, FSDP 64 × EP 8": Case(EXPERTS, 4096, 1, {"dp_shard": 64, "ep": 8, "micro_batch": 4}),
    "mixtral × 4, FSDP 64 × EP 8, full": Case(
        MIXTRAL, 8192, 1, {"dp_shard": 64, "ep": 8, "micro_batch": 2, "recompute": "full"}
    ),
    "gpt2 124M, compiled": Case(GPT2, 1024, 1, {"zero": 0, "micro_batch": 32, "compile": True}),
    "8B × 8, FSDP 64, compiled": Case(LLAMA, 8192, 1, {"dp_shard": 64, "micro_batch": 2, "compile": True}),
    "8B × 8, FSDP 64, compiled, selective": Case(
        LLAMA, 8192, 1, {"dp_shard": 64, "micro_batch": 2, "compile": True, "recompute": "selective"}
    ),
    "8B × 8, FSDP 16 × TP 4, compiled": Case(
        LLAMA, 8192, 1, {"dp_shard": 16, "tp": 4, "micro_batch": 4, "compile": True}
    ),
}


def measure(file: Path, only: str) -> None:
    """Each case in a process of its own, one after the other; what is there already is kept."""
    found = json.loads(file.read_text()) if file.exists() else {}
    for name, case in CASES.items():
        if only in name and name not in found:
            try:
                (row,) = in_children(on_gpu, [(case.run(), case.rank, STEPS, 1.0, None)], at_once=1)
            except Exception as error:
                print(f"{name:40} failed: {type(error).__name__}: {error}".splitlines()[0][:200], flush=True)
                continue
            live = sum(row["parts"].values())
            found[name] = {"live": live, **{key: row[key] for key in ("reserved", "step_seconds", "parts", "device")}}
            print(
                f"{name:40} live {live / GIB:8.3f}  reserved {row['reserved'] / GIB:8.3f} GiB  "
                f"{1e3 * row['step_seconds']:8.1f} ms  ({row['seconds']:.0f} s)",
                flush=True,
            )
            file.write_text(json.dumps(found, indent=1))


def compare(file: Path, cluster_file: Path | None, page: Path | None) -> None:
    """One line for each case, and the errors."""
    measured = json.loads(file.read_text())
    cluster = Cluster.load(yaml.safe_load(cluster_file.read_text()), "cluster") if cluster_file else None
    names = [name for name in CASES if name in measured]
    calls = [(CASES[name].run(), CASES[name].rank, 2, 1.0, None) for name in names]
    rows = []
    for name, traced in zip(names, in_children(on_cpu, calls), strict=True):
        rows.append(_compared(name, measured[name], traced, cluster))
        print(_line(rows[-1]), flush=True)
    text = list(_summary(rows, timed=cluster is not None))
    print("\n".join(text))
    if page:
        _write(page, rows, text, measured[names[0]]["device"], cluster)


def _compared(name: str, found: dict[str, Any], traced: dict[str, Any], cluster: Cluster | None) -> dict[str, Any]:
    case = CASES[name]
    memory: Memory = predict_memory(subject_of_run(case.run()), case.stage)
    live = sum(traced["parts"].values())
    row = {
        "name": name,
        "compiled": bool(case.layout.get("compile")),
        "measured": found["live"] / GIB,
        "rehearsed": live / GIB,
        "planned": memory.live / GIB,
        "reserved": found["reserved"] / GIB,
        "rehearsed_reserved": traced["reserved"] / GIB,
        "measured_ms": 1e3 * found["step_seconds"],
        "parts": {part: (getattr(memory, part) / GIB, traced["parts"][part] / GIB) for part in PARTS},
    }
    if cluster is not None:
        row["predicted_ms"] = 1e3 * alone_seconds(subject_of_run(case.run(cluster.dump())), case.stage)
    return row


def _error(row: dict[str, Any], one: str, other: str) -> float:
    return float(row[one] / row[other] - 1)


def _line(row: dict[str, Any]) -> str:
    time = ""
    if "predicted_ms" in row:
        error = _error(row, "predicted_ms", "measured_ms")
        time = f"  {row['predicted_ms']:8.1f} / {row['measured_ms']:8.1f} ms {error:+6.1%}"
    return (
        f"{row['name']:40} live {row['measured']:8.3f}  rehearsed {_error(row, 'rehearsed', 'measured'):+7.2%}  "
        f"planned {_error(row, 'planned', 'rehearsed'):+7.2%}  reserved {row['reserved']:8.3f} "
        f"{_error(row, 'rehearsed_reserved', 'reserved'):+7.2%}{time}"
    )


def _summary(rows: list[dict[str, Any]], *, timed: bool) -> Iterator[str]:
    def errors(one: str, other: str, of: Iterable[dict[str, Any]]) -> list[float]:
        return sorted(abs(_error(row, one, other)) for row in of)

    for what, compiled in (("eager", False), ("compiled", True)):
        found = errors("rehearsed", "measured", (row for row in rows if row["compiled"] is compiled))
        if found:
            scores = f"mean {statistics.mean(found):.2%}, max {found[-1]:.2%} of {len(found)}"
            yield f"Rehearsed live memory, {what}: {scores}."
    found = errors("rehearsed_reserved", "reserved", rows)
    yield f"Rehearsed reserved memory: mean {statistics.mean(found):.2%}, max {found[-1]:.2%} of {len(found)}."
    found = errors("planned", "rehearsed", rows)
    yield f"Planned live memory beside rehearsed: median {statistics.median(found):.2%}, max {found[-1]:.2%}."
    if timed:
        found = errors("predicted_ms", "measured_ms", rows)
        ninth = found[min(len(found) - 1, int(0.9 * len(found)))]
        yield f"Calibrated step time: median {statistics.median(found):.2%}, p90 {ninth:.2%} of {len(found)}."


def _write(page: Path, rows: list[dict[str, Any]], text: list[str], device: str, cluster: Cluster | None) -> None:
    lines = [
        f"`python -m benchmarks.rehearsed_gpu measure FILE` on {device}; `compare FILE --cluster …` on a CPU.",
        "",
        "| Run, as one rank | live, GiB | rehearsed | planned beside rehearsed | reserved, GiB | rehearsed | step, ms "
        "| predicted |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        time = f"{_error(row, 'predicted_ms', 'measured_ms'):+.1%}" if "predicted_ms" in row else ""
        lines.append(
            f"| {row['name']} | {row['measured']:.3f} | {_error(row, 'rehearsed', 'measured'):+.2%} | "
            f"{_error(row, 'planned', 'rehearsed'):+.2%} | {row['reserved']:.3f} | "
            f"{_error(row, 'rehearsed_reserved', 'reserved'):+.2%} | {row['measured_ms']:.1f} | {time} |"
        )
    write_marked(page, "rehearsed_gpu", [*lines, "", *text])


def tries() -> Iterator[tuple[str, Case]]:
    """One-step tries whose live memory the planner holds to lie between 85 and 105 % of the chip's: of each model and
    layout, three sizes of micro-batch in that range, as far as there are."""
    shapes = {
        "gpt2 124M": (GPT2, 1024, {"zero": 0}),
        "gpt2 350M, FSDP 8": (MEDIUM, 1024, {"dp_shard": 8}),
        "llama 1B, FSDP 8": ("llama3.2-1b", 4096, {"dp_shard": 8}),
        "llama 1B, full": ("llama3.2-1b", 8192, {"dp_shard": 8, "recompute": "full"}),
        "8B × 8, FSDP 64": (LLAMA, 4096, {"dp_shard": 64}),
        "8B × 8, FSDP 8 × TP 4": (LLAMA, 4096, {"dp_shard": 8, "tp": 4}),
        "8B, one stage of 4": ("llama3-8b", 2048, {"dp_shard": 8, "pp": 4, "zero": 2}),
        "qwen3 30B × 6, FSDP 64 × EP 8": (EXPERTS, 2048, {"dp_shard": 64, "ep": 8}),
    }
    for name, (model, sequence, layout) in shapes.items():
        found = []
        for size in range(1, 600):
            case = Case(model, sequence, 8 if "pp" in layout else 1, {**layout, "micro_batch": size})
            run = case.run()
            share = predict_memory(subject_of_run(run), 0).live / (capacity_bytes(run.cluster.gpu) or 0.0)
            if share > 1.05:
                break
            if share >= 0.85:
                found.append((f"{name}, micro-batch {size}", case))
        wanted = sorted({0, len(found) // 2, len(found) - 1}) if found else []
        yield from (found[index] for index in wanted)


def fits(file: Path) -> None:
    """What `plan` says of each try, and what happened."""
    rows = []
    for name, case in tries():
        run = case.run()
        memory = predict_memory(subject_of_run(run), case.stage)
        said = verdict(memory, run.cluster.gpu)
        try:
            (found,) = in_children(on_gpu, [(run, case.rank, 1, 1.0, None)], at_once=1)
            reserved: float | None = found["reserved"] / GIB
        except InputError:
            reserved = None
        rows.append({"name": name, "said": said, "reserved_gib": reserved, "live_gib": memory.live / GIB})
        rows[-1]["case"] = dataclasses.asdict(case)
        happened = "out of memory" if reserved is None else f"ran, {reserved:.1f} GiB reserved"
        print(f"{name:44} planned live {memory.live / GIB:6.1f} GiB, said {said:8} {happened}", flush=True)
        file.write_text(json.dumps(rows, indent=1))
    wrong = sum(row["said"] == "fits" and row["reserved_gib"] is None for row in rows)
    print(f"{len(rows)} tries, false fits: {wrong}")


def judge(file: Path) -> None:
    """What `plan` and a rehearsal on the CPU say of each try that was made."""
    rows = json.loads(file.read_text())
    cases = [Case(**row["case"]) for row in rows]
    runs = [case.run() for case in cases]
    calls = [(run, case.rank, 2, 1.0, None) for run, case in zip(runs, cases, strict=True)]
    wrong: dict[str, list[int]] = {"plan": [0, 0], "rehearse": [0, 0]}
    for row, case, run, traced in zip(rows, cases, runs, in_children(on_cpu, calls), strict=True):
        memory = predict_memory(subject_of_run(run), case.stage)
        rehearsed = verdict_of(sum(traced["parts"].values()), traced["reserved"], memory, run.cluster.gpu)
        ran = row["reserved_gib"] is not None
        said = {"plan": verdict(memory, run.cluster.gpu), "rehearse": rehearsed}
        for who, word in said.items():
            wrong[who][0] += word == "fits" and not ran
            wrong[who][1] += word == "oom" and ran
        print(f"{row['name']:46} plan {said['plan']:6} rehearse {said['rehearse']:6} {'ran' if ran else 'did not fit'}",
              flush=True)  # fmt: skip
    print(", ".join(f"{who}: {fits} false fits, {oom} false OOMs" for who, (fits, oom) in wrong.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("measure", "fits", "compare", "judge"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--page", type=Path)
    words = parser.parse_args()
    if words.verb == "measure":
        measure(words.file, words.only)
    elif words.verb == "fits":
        fits(words.file)
    elif words.verb == "judge":
        judge(words.file)
    else:
        compare(words.file, words.cluster, words.page)


if __name__ == "__main__":
    main()
