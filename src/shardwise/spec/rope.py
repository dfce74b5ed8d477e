"""How RoPE's frequencies are changed for contexts longer than the one a model was first trained on."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shardwise.spec.noun import Noun
from shardwise.spec.numbers import Count, NotNegative, Positive


class LinearScaling(Noun):
    """Every frequency divided by `factor` (position interpolation, arXiv 2306.15595)."""

    kind: Literal["linear"]
    factor: Positive


class DynamicScaling(Noun):
    """NTK-aware: for sequences longer than max_sequence, the base grows with their length; shorter ones are plain."""

    kind: Literal["dynamic"]
    factor: Positive


class YarnScaling(Noun):
    """Long wavelengths divided by `factor`, short ones kept, those between blended (YaRN, arXiv 2309.00071)."""

    kind: Literal["yarn"]
    factor: Positive
    original_sequence: Count  # context before the extension
    beta_fast: Positive = 32.0  # dimensions that turn more often than this within it are kept
    beta_slow: Positive = 1.0  # those that turn less often are divided by `factor`
    truncate: bool = True  # round the two borders to whole dimensions
    attention_factor: Positive | None = None  # scales cos and sin; default: 0.1 · ln(factor) + 1 (equation 22)
    mscale_all_dim: NotNegative = 0.0  # DeepSeek: scores are scaled, too, by (0.1 · mscale_all_dim · ln(factor) + 1)²

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def score_factor(self) -> float:
        """What the attention scores are multiplied with, beside 1/√d (`yarn_apply_mscale` in transformers)."""
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2 if self.factor > 1 else 1.0


class LongScaling(Noun):
    """A divisor per frequency, from one of two lists: for sequences up to original_sequence, and for longer ones
    (LongRoPE, arXiv 2402.13753)."""

    kind: Literal["longrope"]
    factor: Positive  # by how much the context was extended
    original_sequence: Annotated[Count, Field(ge=2)]
    short_factors: tuple[Positive, ...]  # head_dim / 2 of them
    long_factors: tuple[Positive, ...]
    attention_factor: Positive | None = None  # scales cos and sin; default: √(1 + ln(factor) / ln(original_sequence))

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        extended = math.log(self.factor) / math.log(self.original_sequence) if self.factor > 1 else 0.0
        return math.sqrt(1 + extended)


class Llama3Scaling(Noun):
    """Wavelengths beyond the original context stretched by `factor`, short ones kept, those between blended
    (`rope_type: llama3` in Meta's Llama 3.1 release)."""

    kind: Literal["llama3"]
    factor: Positive
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    original_sequence: Count = 8192

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor {self.high_frequency_factor:g} must be larger than low_frequency_factor "
                f"{self.low_frequency_factor:g}"
            )
        return self


ROPE_SCALINGS: dict[str, type[Noun]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "longrope": LongScaling,
    "llama3": Llama3Scaling,
}

RopeScaling = Annotated[
    LinearScaling | DynamicScaling | YarnScaling | LongScaling | Llama3Scaling, Field(discriminator="kind")
]
