"""Fit the stacks' constants to the calibration half of the published runs.

python -m benchmarks.fit_stacks ../shared/data/published_runs.jsonl

Coordinate descent on the mean |log(predicted / measured)| of step times, each source weighing the same and each row's
error capped, within physical bounds. Kernels (shares of the peak) belong to a family of software, overlaps and
overheads to one stack. Held-out sources are never read. Prints the constants as `planner/stacks.py` holds them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.published_nouns import Row, Unusable, stack_of
from benchmarks.published_rows import CALIBRATION, source_of, subject_of
from benchmarks.published_schema import read_rows
from benchmarks.published_time import measured_seconds

from shardwise.planner.stacks import STACKS, Stack, generation
from shardwise.planner.step import predict_step
from shardwise.planner.subject import Subject
from shardwise.spec import InputError

FAMILIES = {"torch": ("torchtitan", "fsdp1"), "megatron": ("megatron", "deepspeed")}
CAP = 0.6  # of one row's |log error|: a row that no constant can explain must not pull one
_STEPS = (0.25, 0.12, 0.06, 0.03)

# Bounds of shares are those of the best kernels measured on any chip. A scale moves by a factor, the rest by a part of
# their range.
_BOUNDS = {
    "gemm": (0.15, 0.92),
    "attention": (0.1, 0.75),
    "traffic": (0.8, 3.5),
    "slowdown": (0.02, 0.3),
    "context_imbalance": (1.0, 2.0),
    "hides_data": (0.0, 1.0),
    "hides_tensor": (0.0, 0.9),
    "hides_expert": (0.0, 0.9),
    "layer_overhead_seconds": (0.0, 1e-3),
    "expert_overhead_seconds": (0.0, 3e-3),
}
_SCALES = ("gemm", "attention", "traffic", "slowdown", "context_imbalance")
_FITTED = {
    "torchtitan": ("traffic", "slowdown", "hides_tensor", "context_imbalance", "layer_overhead_seconds"),
    "fsdp1": ("traffic", "slowdown", "layer_overhead_seconds"),
    "megatron": ("traffic", "slowdown", "hides_data", "hides_tensor", "hides_expert", "layer_overhead_seconds",
                 "expert_overhead_seconds"),
    "deepspeed": ("traffic", "slowdown", "layer_overhead_seconds"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    row: Row
    subject: Subject
    measured: float

    @property
    def stack(self) -> str:
        return self.subject.stack.name


@dataclass(frozen=True)
class Constant:
    """One number to fit: `key` is a (generation, dtype) or a generation, None for a stack's own number; `stacks` are
    those that it applies to."""

    name: str
    stacks: tuple[str, ...]
    key: object = None

    def applies(self, case: Case) -> bool:
        if case.stack not in self.stacks:
            return False
        family = generation(case.subject.cluster.gpu)
        if self.name == "attention":
            return family == self.key
        if self.name == "gemm":  # a head runs in bf16 whatever the layers do
            return self.key in ((family, case.subject.dtype), (family, "bf16"))
        return True


@dataclass
class Fit:
    cases: list[Case]
    stacks: dict[str, Stack]
    errors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.errors = [self.error(case) for case in self.cases]

    def error(self, case: Case) -> float:
        subject = replace(case.subject, stack=stack_of(case.row["layout"], self.stacks))
        return min(CAP, abs(math.log(predict_step(subject).seconds / case.measured)))

    def loss(self, errors: list[float]) -> float:
        by_source: dict[str, list[float]] = defaultdict(list)
        for case, error in zip(self.cases, errors, strict=True):
            by_source[source_of(case.row)].append(error)
        return statistics.mean(statistics.mean(values) for values in by_source.values())

    def value(self, constant: Constant) -> float:
        held = getattr(self.stacks[constant.stacks[0]], constant.name)
        return float(held if constant.key is None else held[constant.key])

    def put(self, constant: Constant, value: float) -> None:
        for name in constant.stacks:
            stack = self.stacks[name]
            held: Any = value
            if constant.key is not None:
                held = {**getattr(stack, constant.name), constant.key: value}
            changes: dict[str, Any] = {constant.name: held}
            self.stacks[name] = replace(stack, **changes)

    def improve(self, constant: Constant, step: float) -> bool:
        """One move of one constant, up or down, where it lowers the loss."""
        low, high = _BOUNDS[constant.name]
        old, best = self.value(constant), self.loss(self.errors)
        touched = [index for index, case in enumerate(self.cases) if constant.applies(case)]
        for sign in (1, -1):
            moved = old * (1 + step) ** sign if constant.name in _SCALES else old + sign * step * (high - low)
            self.put(constant, min(high, max(low, moved)))
            errors = list(self.errors)
            for index in touched:
                errors[index] = self.error(self.cases[index])
            if self.loss(errors) < best - 1e-5:
                self.errors = errors
                return True
        self.put(constant, old)
        return False


def constants(names: tuple[str, ...], cases: list[Case]) -> Iterator[Constant]:
    """Those that at least one case depends on."""
    shared = Constant("", names)
    for name in names:  # a stack may have its own attention beside its family's products
        for key in STACKS[name].attention:
            yield replace(shared, name="attention", stacks=(name,), key=key)
        for number in _FITTED[name]:
            yield Constant(number, (name,))
    for pair in STACKS[names[0]].gemm:
        if any(replace(shared, name="gemm", key=pair).applies(case) for case in cases):
            yield replace(shared, name="gemm", key=pair)


def calibration_cases(rows: list[Row]) -> list[Case]:
    cases = []
    for row in rows:
        if source_of(row) not in CALIBRATION or row.get("quality") == "C" or row["measured"].get("oom"):
            continue
        try:
            subject = subject_of(row)
            cases.append(Case(row, subject, measured_seconds(row, subject)))
        except Unusable:
            continue
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    try:
        every = calibration_cases(read_rows(arguments.file))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for family, names in FAMILIES.items():
        cases = [case for case in every if case.stack in names]
        fit = Fit(cases, dict(STACKS))
        print(f"# {family}: {len(cases)} rows, mean |log error| {fit.loss(fit.errors):.4f}", flush=True)
        free = [constant for constant in constants(names, cases) if any(map(constant.applies, cases))]
        for step in _STEPS:
            for constant in free:
                for _ in range(6):
                    if not fit.improve(constant, step):
                        break
            print(f"#   step {step}: {fit.loss(fit.errors):.4f}", flush=True)
        _print(fit, family)
    return 0


def _print(fit: Fit, family: str) -> None:
    """As planner/stacks.py spells them: the family's products, then each stack with all that is not the default."""
    names = FAMILIES[family]
    table = f"_{family.upper()}_GEMM"
    print(f"{table} = {_rounded(fit.stacks[names[0]].gemm)}")
    for name in names:
        stack, default = fit.stacks[name], Stack(name, {}, {})
        numbers = {key: value for key, value in vars(stack).items() if isinstance(value, float)}
        changed = "".join(f", {key}={value:.3g}" for key, value in numbers.items() if value != getattr(default, key))
        print(f'Stack("{name}", {table}, {_rounded(stack.attention)}{changed}),')


def _rounded(shares: Mapping[Any, float]) -> dict[Any, float]:
    return {key: round(value, 3) for key, value in shares.items()}


if __name__ == "__main__":
    sys.exit(main())
