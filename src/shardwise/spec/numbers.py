"""Numbers as people write them: `16M` is 16,000,000; `6e-4` is a number although YAML 1.1 reads it as text."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_number(value: Any) -> int | float:
    """An int, a float, or text with an optional decimal suffix K, M, G or T. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number is expected, such as 8192, 6e-4 or 16M")
    if isinstance(value, str):
        text = value.strip().replace("_", "").replace(",", "")
        factor = _SUFFIXES.get(text[-1:].upper(), 1)
        try:
            value = float(text[:-1] if factor > 1 else text) * factor
        except ValueError:
            raise ValueError("a number is expected, such as 8192, 6e-4 or 16M") from None
    if not math.isfinite(value):
        raise ValueError("a finite number is expected")
    return value


def parse_count(value: Any) -> int:
    """A whole number, in any of the spellings of `parse_number`. Raises ValueError."""
    number = parse_number(value)
    if number != int(number):
        raise ValueError(f"a whole number is expected; nearest: {round(number)}")
    return int(number)


Count = Annotated[int, BeforeValidator(parse_count), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(parse_count), Field(ge=0)]
NotNegative = Annotated[float, BeforeValidator(parse_number), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(parse_number), Field(gt=0)]
Fraction = Annotated[float, BeforeValidator(parse_number), Field(ge=0, le=1)]


def human(number: float) -> str:
    """A number with a decimal suffix, for people: 124439808 -> '124.4M'."""
    for suffix, factor in reversed(_SUFFIXES.items()):
        if abs(number) >= factor:
            return f"{number / factor:.4g}{suffix}"
    return f"{number:.4g}"
