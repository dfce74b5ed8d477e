"""Experts, LatentAttention: what mixture-of-experts and DeepSeek's attention add to a Model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from shardwise.spec.noun import Noun
from shardwise.spec.numbers import Count, CountOrZero, Positive


class Experts(Noun):
    """A mixture-of-experts MLP in every layer but the first `dense_layers`, whose MLP is the Model's `ffn`."""

    count: Count  # routed experts of a layer
    top_k: Count  # how many of them a token goes through
    ffn: Count  # inner size of one routed expert
    shared_ffn: CountOrZero = 0  # inner size of the shared experts together, through which every token goes
    shared_gate: bool = False  # a learned scalar gate on the shared experts' output
    dense_layers: CountOrZero = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False  # per-expert bias, added for the choice only (DeepSeek-V3); gpt-oss has a plain one
    groups: Count = 1  # of equally many experts, one after the other
    top_groups: Count = 1  # how many of them a token may choose from: those whose two best scores sum to most
    normalized: bool = True  # a token's weights sum to 1, before they are scaled
    scale: Positive = 1.0  # of the weights
    # In training, an expert takes at most factor · sequence · top_k / count of a sequence's tokens, the earliest;
    # None: all that choose it.
    capacity_factor: Positive | None = None

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.top_k > self.count:
            raise ValueError(f"top_k {self.top_k} is more than the {self.count} experts; nearest: {self.count}")
        if self.shared_gate and not self.shared_ffn:
            raise ValueError("shared_gate needs a shared expert; what works: shared_gate: false, or shared_ffn > 0")
        if self.count % self.groups:
            legal = [n for n in range(1, self.count + 1) if self.count % n == 0]
            near = min(legal, key=lambda n: abs(n - self.groups))
            raise ValueError(f"groups {self.groups} does not divide the {self.count} experts; nearest: {near}")
        if self.top_groups > self.groups:
            raise ValueError(
                f"top_groups {self.top_groups} is more than the {self.groups} groups; nearest: {self.groups}"
            )
        if self.top_k > (open_to := self.count // self.groups * self.top_groups):
            raise ValueError(
                f"top_k {self.top_k} is more than the {open_to} experts of {self.top_groups} groups; nearest: {open_to}"
            )
        return self


class LatentAttention(Noun):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values from a narrow latent, and queries
    too where `query_rank` is not 0. It replaces kv_heads and head_dim of the Model."""

    query_rank: CountOrZero
    kv_rank: Count
    nope_dim: Count  # of each head's query and key, not rotated
    rope_dim: Count  # rotated; the key's is shared by all heads
    value_dim: Count
