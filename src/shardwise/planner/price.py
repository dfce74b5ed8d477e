"""What a run costs: an offer for its chip, times hours."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from shardwise.spec import InputError
from shardwise.spec.noun import unknown
from shardwise.spec.price import Price

_FRESH_DAYS = 120  # an older offer counts only where there is no younger one


def choose_price(
    offers: Iterable[Price], gpu: str, today: datetime.date, *, provider: str | None = None, spot: bool = False
) -> Price | None:
    """The cheapest matching offer for a chip among those seen of late; None where nobody recorded one.

    Without `spot`, only on-demand offers count. Raises InputError for a provider that sells no such chip, naming those
    that do.
    """
    kinds = ("spot", "community") if spot else ("on-demand",)
    matching = [offer for offer in offers if offer.gpu == gpu and offer.kind in kinds]
    if provider is not None:
        known = {offer.provider for offer in matching}
        if provider not in known:
            kind = "spot" if spot else "on-demand"
            raise InputError(f"--provider: {unknown(f'provider of {kind} {gpu}', provider, known)}")
        matching = [offer for offer in matching if offer.provider == provider]
    fresh = [offer for offer in matching if age_days(offer, today) <= _FRESH_DAYS]
    return min(fresh or matching, key=lambda offer: offer.usd_per_gpu_hour, default=None)


def age_days(price: Price, today: datetime.date) -> int:
    return (today - price.date).days
