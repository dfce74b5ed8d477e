"""Model: the dimensions of a decoder-only transformer."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from shardwise.spec.noun import Noun
from shardwise.spec.numbers import Count, Positive, parse_count


class RopeScaling(Noun):
    """Llama-3's frequency scaling: wavelengths beyond the original context are stretched by `factor`.

    Source: `rope_type: llama3` in Meta's Llama-3.1 release (low/high frequency factors over the original context).
    """

    kind: Literal["llama3"] = "llama3"
    factor: Positive
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    original_sequence: Count = 8192


class Model(Noun):
    """Architecture of one dense decoder. Two families: GPT-2 (learned positions, LayerNorm, GELU, biases)
    and Llama (RoPE, RMSNorm, SwiGLU, grouped-query attention); every choice can also be set by itself."""

    name: str = "custom"
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count  # default: heads (no grouping)
    head_dim: Count  # default: hidden / heads
    ffn: Count
    vocabulary: Count
    max_sequence: Count  # rows of the learned position table, or the longest context trained with RoPE
    positions: Literal["learned", "rope"] = "rope"
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_eps: Positive = 1e-5
    activation: Literal["gelu", "swiglu"] = "swiglu"
    bias: bool = False  # on every projection, and on LayerNorm
    qk_norm: bool = False  # RMSNorm over each head's query and key
    tied: bool = False  # the output head is the embedding

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        try:
            heads, hidden = (parse_count(data.get(key)) for key in ("heads", "hidden"))
        except ValueError:
            return data  # the fields' own validation says what is wrong
        data.setdefault("kv_heads", heads)
        if heads > 0 and "head_dim" not in data:
            if hidden % heads:
                raise ValueError(
                    f"hidden {hidden} is not a multiple of heads {heads}; "
                    f"nearest: hidden {round(hidden / heads) * heads or heads}, or set head_dim"
                )
            data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            best = min(legal, key=lambda n: abs(n - self.kv_heads))
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}; nearest: {best}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for RoPE; nearest: {self.head_dim + 1}")
        if self.rope_scaling and self.positions != "rope":
            raise ValueError("rope_scaling needs positions: rope")
        return self
