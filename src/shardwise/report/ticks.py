"""Where an axis has its ticks, and how numbers are written for people."""

from __future__ import annotations

import itertools
import math

_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], at most `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten within [low, high], with their multiples of 2 and 5 where there is room; low > 0."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(found) <= most:
            break
    return found[:: math.ceil(len(found) / most)] if found else []


def tick_labels(ticks: list[float]) -> list[str]:
    """One text for each tick, all with the same number of decimals where they are small."""
    largest = max(map(abs, ticks), default=0.0)
    if largest >= 100_000:
        return [short(tick) for tick in ticks]
    gaps = [abs(after - before) for before, after in itertools.pairwise(ticks)]
    gap = min(gaps, default=largest) or 1.0
    if largest < 0.001:
        return ["0" if tick == 0 else f"{tick:.1e}".replace(".0e", "e").replace("e-0", "e-") for tick in ticks]
    decimals = next((count for count in range(6) if abs(gap * 10**count - round(gap * 10**count)) < 1e-6), 6)
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def short(number: float) -> str:
    """A large number as it is spoken of: 397000 -> '397 K', 9890562048 -> '9.89 B'; small ones with three digits."""
    for factor, suffix in _SUFFIXES:
        if abs(number) >= factor * 0.9995:
            return f"{_three(number / factor)} {suffix}"
    return _three(number)


def _three(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 99.95 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """'0.31 s', '42.3 s', '12 min 5 s', '6 h 18 min', '2 d 4 h'."""
    if seconds < 0.005:
        return "0 s"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    for unit, smaller, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        rounded = round(seconds / part) * part
        if rounded >= size:
            return f"{rounded // size} {unit} {rounded % size // part} {smaller}"
    return f"{seconds:.0f} s"
