"""Price: what an hour of one chip costs, where, and when somebody looked."""

from __future__ import annotations

import datetime
from typing import Literal

from shardwise.spec.noun import Noun
from shardwise.spec.numbers import Positive


class Price(Noun):
    """One dated offer. Prices move by the week: whoever prints one prints its date."""

    gpu: str
    provider: str
    usd_per_gpu_hour: Positive
    kind: Literal["on-demand", "spot", "community"] = "on-demand"
    date: datetime.date
    source: str
