"""Which price counts: a given one, a live one, or one of the dated snapshot."""

from __future__ import annotations

import datetime

from shardwise.planner.live_prices import NoLivePrices, live_prices
from shardwise.planner.price import choose_price
from shardwise.spec import Gpu, InputError
from shardwise.spec.presets import prices
from shardwise.spec.price import Price
from shardwise.verbs.notes import on_price


def choose_offer(
    gpu: Gpu, *, provider: str | None = None, price: float | None = None, spot: bool = False, live: bool = False
) -> tuple[Price | None, list[str]]:
    """The offer for a chip, and notes on where it is from.

    price: USD per GPU-hour, instead of an offer. live: ask gpuhunt first; where it has no answer, the snapshot counts.
    Raises InputError for a provider that sells no such chip, or where live prices need a package.
    """
    today, notes = datetime.date.today(), []
    if price is not None:
        if live:
            raise InputError("--price and --live-prices exclude each other: give one of them")
        given = {"gpu": gpu.name, "provider": "given", "usd_per_gpu_hour": price, "date": today, "source": "--price"}
        return Price.load(given, "--price"), notes
    offer = None
    if live:
        try:
            found = [item for item in live_prices() if provider in (None, item.provider)]
            offer = choose_price(found, gpu.name, today, spot=spot)
            if offer is None:
                kind = "spot" if spot else "on-demand"
                notes.append(f"gpuhunt has no {kind} offer of {gpu.name}: the snapshot counts")
        except NoLivePrices as error:
            notes.append(f"no live prices, so the snapshot counts: {error}")
    offer = offer or choose_price(prices(), gpu.name, today, provider=provider, spot=spot)
    notes.append(on_price(offer, today) if offer else f"no dated price of {gpu.name} is known: give --price")
    return offer, notes
