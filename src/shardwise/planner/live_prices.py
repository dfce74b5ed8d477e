"""Live prices, read with gpuhunt (https://github.com/dstackai/gpuhunt) in a process of its own.

gpuhunt sets no time limit on its requests, and its threads keep a process from ending: so that process is ended here.
"""

from __future__ import annotations

import datetime
import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from shardwise.spec import InputError
from shardwise.spec.price import Price

# gpuhunt's name and memory in GB. It does not tell SXM from PCIe cards, but the name of an instance often does.
_CHIPS = {"l4": ("L4", 24), "a10g": ("A10G", 24), "l40s": ("L40S", 48), "a100-40-sxm": ("A100", 40),
          "a100-80-sxm": ("A100", 80), "a100-80-pcie": ("A100", 80), "h100-sxm": ("H100", 80),
          "h100-pcie": ("H100", 80), "h200-sxm": ("H200", 141), "b200-sxm": ("B200", 180), "b300-sxm": ("B300", 270),
          "gb200-nvl72": ("GB200", 186), "gb300-nvl72": ("GB300", 270), "mi300x": ("MI300X", 192)}  # fmt: skip
_PCIE = ("pcie", "nvl", "standard_nc")  # Azure's NC series has PCIe cards
_PROVIDERS = {"lambdalabs": "lambda", "vastai": "vast"}  # as the snapshot calls them
_MARKETS = ("vast",)  # where people rent out their own machines


class NoLivePrices(Exception):
    """Why there are none."""


def require_gpuhunt() -> None:
    """Raise InputError where it is not installed."""
    if "gpuhunt" not in sys.modules and importlib.util.find_spec("gpuhunt") is None:
        raise InputError("--live-prices needs a package that is not installed: pip install 'shardwise[prices]'")


def live_prices(timeout: float = 30.0) -> tuple[Price, ...]:
    """Today's cheapest offer of each provider, chip and kind. timeout: in seconds, for all of it.

    Raises InputError where gpuhunt is not installed, and NoLivePrices, in one sentence, where it found nothing.
    """
    require_gpuhunt()
    offers, problem = _ask(timeout)
    if problem:
        raise NoLivePrices(problem)
    return offers


@functools.cache
def _ask(timeout: float) -> tuple[tuple[Price, ...], str]:
    """The offers, or why there are none: asked once, whatever the answer."""
    command = [sys.executable, "-m", "shardwise.planner.live_prices"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return (), f"gpuhunt did not answer within {timeout:.0f} seconds"
    except OSError as error:
        return (), f"gpuhunt cannot be started: {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return (), f"gpuhunt failed: {lines[-1] if lines else f'exit code {done.returncode}'}"
    try:
        offers = tuple(Price.load(row, "price") for row in json.loads(done.stdout.splitlines()[-1]))
    except (InputError, ValueError, IndexError):
        return (), "what gpuhunt answered cannot be read"
    return offers, "" if offers else "gpuhunt found no offer"


def query_offers(today: datetime.date) -> list[dict[str, Any]]:
    """The same in this process, as plain types. Raises whatever gpuhunt does."""
    import gpuhunt

    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    for item in gpuhunt.query(gpu_name=sorted({name for name, _ in _CHIPS.values()}), min_gpu_count=1):
        provider = _PROVIDERS.get(item.provider, item.provider)
        kind = "spot" if item.spot else "community" if provider in _MARKETS else "on-demand"
        price = item.price / item.gpu_count
        for chip in _chips(item):
            key = (chip, provider, kind)
            if price > 0 and (key not in best or price < best[key]["usd_per_gpu_hour"]):
                best[key] = {"gpu": chip, "provider": provider, "usd_per_gpu_hour": round(price, 4), "kind": kind,
                             "date": today.isoformat(), "source": "gpuhunt"}  # fmt: skip
    return list(best.values())


def _chips(item: Any) -> Iterator[str]:
    """Our names for what an offer has: at most one, but for its size of memory, which is stated in GB or in GiB."""
    on_pcie = any(mark in item.instance_name.lower() for mark in _PCIE)
    for chip, (name, memory) in _CHIPS.items():
        if (item.gpu_name or "").upper() != name or abs((item.gpu_memory or 0) / memory - 1) > 0.1:
            continue
        if chip.endswith("-pcie") == on_pcie or not chip.endswith(("-pcie", "-sxm")):
            yield chip


if __name__ == "__main__":
    print(json.dumps(query_offers(datetime.date.today())))
