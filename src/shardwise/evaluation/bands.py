"""Bands: which validation loss is expected after how many tokens, and whether a run kept to it. No torch."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from shardwise.spec import InputError, Noun, Run, read_yaml
from shardwise.spec.numbers import Count, Positive, human


class Point(Noun):
    """After training on `tokens`, the validation loss is expected within `loss` ± `tolerance` (nats per token)."""

    tokens: Count
    loss: Positive
    tolerance: Positive


class Bands(Noun):
    """What `--expect` reads. Between two points loss and tolerance are interpolated over the logarithm of the tokens;
    before the first and after the last nothing is expected."""

    name: str
    source: str  # where the losses were published, and where the tolerances come from
    points: tuple[Point, ...] = Field(min_length=1)

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: tuple[Point, ...]) -> tuple[Point, ...]:
        for before, after in itertools.pairwise(points):
            if after.tokens <= before.tokens:
                raise ValueError(f"tokens must ascend, but {after.tokens} comes after {before.tokens}")
        return points

    def at(self, tokens: int) -> Point | None:
        """What is expected after `tokens`; None where nothing is."""
        if not self.points[0].tokens <= tokens <= self.points[-1].tokens:
            return None
        after = next(point for point in self.points if point.tokens >= tokens)
        if after.tokens == tokens:
            return after
        before = self.points[self.points.index(after) - 1]
        share = math.log(tokens / before.tokens) / math.log(after.tokens / before.tokens)
        return Point(
            tokens=tokens,
            loss=before.loss + share * (after.loss - before.loss),
            tolerance=before.tolerance + share * (after.tolerance - before.tolerance),
        )

    def check(self, tokens: int, loss: float) -> Verdict | None:
        """Compare a validation loss after `tokens`; None where nothing is expected there."""
        expected = self.at(tokens)
        return expected and Verdict(tokens, loss, expected.loss, expected.tolerance)


_VERDICT = ("expected_loss", "tolerance", "inside")  # in evaluations.jsonl


@dataclass(frozen=True)
class Verdict:
    """One comparison."""

    tokens: int
    loss: float
    expected: float
    tolerance: float

    @property
    def inside(self) -> bool:
        return abs(self.loss - self.expected) <= self.tolerance

    def dump(self) -> dict[str, Any]:
        """What evaluations.jsonl says of it."""
        return dict(zip(_VERDICT, (self.expected, self.tolerance, self.inside), strict=True))

    def describe(self) -> str:
        tokens = f"{self.tokens / 1e9:.3g} B" if self.tokens >= 1e7 else f"{self.tokens:,}"
        return (
            f"validation loss {self.loss:.4f} at {tokens} tokens: expected {self.expected:.4f} ± "
            f"{self.tolerance:.2g}: {'inside' if self.inside else 'OUTSIDE'}"
        )


def load_bands(path: str | Path, run: Run) -> Bands:
    """Read a file of bands. Raises InputError where it is wrong, or expects nothing of any evaluation of this Run."""
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise InputError(f"--expect {path}: a mapping with name, source and points is expected")
    try:
        bands = Bands.load(data)
    except InputError as error:
        raise InputError(f"--expect {path}: {error}") from None
    if not any(bands.at(tokens) for tokens in _evaluated_at(run)):
        first, last = human(bands.points[0].tokens), human(bands.points[-1].tokens)
        raise InputError(
            f"--expect {path}: this Run is never evaluated between {first} and {last} tokens, where the bands lie "
            f"(recipe.evaluation.every {run.recipe.evaluation.every}, {run.recipe.total_steps} steps of "
            f"{human(run.recipe.batch_tokens or 0)} tokens)"
        )
    return bands


def _evaluated_at(run: Run) -> Iterator[int]:
    """The tokens after which this Run is evaluated."""
    recipe = run.recipe
    if not (recipe.evaluation.tokens and recipe.batch_tokens and (recipe.steps or recipe.tokens)):
        return
    every, total = recipe.evaluation.every, recipe.total_steps
    for step in [*(range(every, total, every) if every else ()), total]:
        yield step * recipe.batch_tokens


def check_all(path: Path, bands: Bands, batch_tokens: int) -> None:
    """Put verdicts into every line of an evaluations.jsonl, also those that were written without these bands."""
    lines = []
    for line in path.read_text().splitlines():
        record = {key: value for key, value in json.loads(line).items() if key not in _VERDICT}
        verdict = bands.check(record["step"] * batch_tokens, record["loss"])
        lines.append(json.dumps(record | (verdict.dump() if verdict else {})) + "\n")
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def summarize(path: Path) -> tuple[bool, str]:
    """Whether an evaluations.jsonl holds verdicts and all say 'inside'; and the same in a sentence."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    checked = [record for record in records if "inside" in record]
    outside = [f"{record['step']:,}" for record in checked if not record["inside"]]
    if not checked:
        return False, "no validation loss was compared with its band"
    if not outside:
        return True, f"validation loss inside its band at {len(checked)} of {len(checked)} evaluations"
    steps = f"step{'s' * (len(outside) > 1)} {', '.join(outside)}"
    return False, f"validation loss OUTSIDE its band at {len(outside)} of {len(checked)} evaluations: {steps}"
