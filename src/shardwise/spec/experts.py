"""Experts, LatentAttention: what mixture-of-experts and DeepSeek's attention add to a Model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from shardwise.spec.noun import Noun
from shardwise.spec.numbers import Count, CountOrZero


class Experts(Noun):
    """A mixture-of-experts MLP in every layer but the first `dense_layers`, whose MLP is the Model's `ffn`."""

    count: Count  # routed experts of a layer
    top_k: Count  # how many of them a token goes through
    ffn: Count  # inner size of one routed expert
    shared_ffn: CountOrZero = 0  # inner size of the shared experts together, through which every token goes
    shared_gate: bool = False  # a learned scalar gate on the shared experts' output
    dense_layers: CountOrZero = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False  # per-expert bias of the balancing without auxiliary loss (DeepSeek-V3), or a plain one

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.top_k > self.count:
            raise ValueError(f"top_k {self.top_k} is more than the {self.count} experts; nearest: {self.count}")
        return self


class LatentAttention(Noun):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values from a narrow latent, and queries
    too where `query_rank` is not 0. It replaces kv_heads and head_dim of the Model."""

    query_rank: CountOrZero
    kv_rank: Count
    nope_dim: Count  # of each head's query and key, not rotated
    rope_dim: Count  # rotated; the key's is shared by all heads
    value_dim: Count
