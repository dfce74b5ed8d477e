"""Layout: how the work is spread. All that must not change what is learned."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from shardwise.spec.noun import Noun
from shardwise.spec.numbers import Count, CountOrZero


class Layout(Noun):
    """One point of the search space; every field's meaning stands in docs/run-file.md.

    world = dp_replicate · dp_shard · tp · cp · pp; `ep` divides dp_shard · cp · tp.
    """

    dp_replicate: Count = 1
    dp_shard: Count = 1
    tp: Count = 1
    cp: Count = 1
    cp_method: Literal["allgather", "ring", "ulysses"] = "allgather"
    pp: Count = 1
    ep: Count = 1
    zero: Literal[0, 1, 2, 3]  # default: 3 where dp_shard > 1, else 0
    micro_batch: Count = 1  # sequences in one forward pass of a data rank
    schedule: Literal["gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv", "dualpipev"] = "1f1b"
    virtual_stages: Count = 1
    recompute: str = "none"
    offload: Literal["none", "optimizer", "parameters", "activations"] = "none"
    prefetch: CountOrZero = 1  # FSDP2: units gathered ahead of the one that computes
    bucket_mb: Count = 25  # DDP: MiB of gradients that are reduced together
    async_tp: bool = False
    loss: Literal["full", "chunked"] = "full"
    compile: bool = False

    @model_validator(mode="before")
    @classmethod
    def _derive_zero(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("zero") is None:
            return {**data, "zero": 3 if data.get("dp_shard", 1) != 1 else 0}
        return data

    @field_validator("recompute")
    @classmethod
    def _known_recompute(cls, value: str) -> str:
        every = value.removeprefix("every:")
        if value in ("none", "selective", "full", "sqrt") or (every != value and every.isdigit() and int(every) > 0):
            return value
        raise ValueError("one of none, selective, full, sqrt, every:K (K ≥ 1) is expected")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """The degrees that are not 1, for messages: 'dp_replicate 2 × dp_shard 2, zero 3, micro_batch 1'."""
        degrees = [
            f"{name} {getattr(self, name)}"
            for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp")
            if getattr(self, name) > 1
        ]
        return " × ".join(degrees or ["one rank"]) + f", zero {self.zero}, micro_batch {self.micro_batch}"
