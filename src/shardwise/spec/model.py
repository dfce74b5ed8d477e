"""Model: the dimensions of a decoder-only transformer."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from shardwise.spec.experts import Experts, LatentAttention
from shardwise.spec.noun import Noun, unknown
from shardwise.spec.numbers import Count, Positive, parse_count
from shardwise.spec.rope import ROPE_SCALINGS, DynamicScaling, LongScaling, RopeScaling, YarnScaling


class Model(Noun):
    """Architecture of one dense decoder. Its choices are those between GPT-2 (learned positions, LayerNorm, GELU,
    biases) and Llama and what followed it (RoPE, RMSNorm, SwiGLU, grouped queries); each can be made by itself."""

    name: str = "custom"
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count  # default: heads (no grouping)
    head_dim: Count  # default: hidden / heads
    ffn: Count
    vocabulary: Count
    max_sequence: Count  # rows of the learned position table, or the longest context trained with RoPE
    sliding_window: Count | None = None  # positions that attention may look back, itself included; None: all
    positions: Literal["learned", "rope"] = "rope"
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_eps: Positive = 1e-5
    activation: Literal["gelu", "swiglu"] = "swiglu"
    qkv_bias: bool = False  # on the query, key and value projections
    out_bias: bool = False  # on attention's output projection
    mlp_bias: bool = False
    norm_bias: bool = False  # LayerNorm only
    qk_norm: bool = False  # RMSNorm over each head's query and key
    tied: bool = False  # the output head is the embedding
    attention_sinks: bool = False  # a learned logit per head beside the scores (gpt-oss)
    experts: Experts | None = None
    latent: LatentAttention | None = None

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
            if hidden % heads and not data.get("latent"):
                raise ValueError(
                    f"hidden {hidden} is not a multiple of heads {heads}; "
                    f"nearest: hidden {round(hidden / heads) * heads or heads}, or set head_dim"
                )
            data["head_dim"] = max(1, hidden // heads)
        return data

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _known_kind(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("kind") not in ROPE_SCALINGS:
            raise ValueError(unknown("kind", str(value.get("kind", "")), ROPE_SCALINGS))
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            best = min(legal, key=lambda n: abs(n - self.kv_heads))
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}; nearest: {best}")
        if self.positions == "rope" and self.rotary_dim % 2:
            field = "latent.rope_dim" if self.latent else "head_dim"
            raise ValueError(f"{field} {self.rotary_dim} must be even for RoPE; nearest: {self.rotary_dim + 1}")
        for field in ("qkv_bias", "qk_norm") if self.latent else ():
            if getattr(self, field):
                raise ValueError(f"{field} does not go with latent attention; what works: {field}: false")
        if self.norm_bias and self.norm != "layernorm":
            raise ValueError("norm_bias needs norm: layernorm")
        self._check_rope_scaling()
        return self

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that RoPE rotates."""
        return self.latent.rope_dim if self.latent else self.head_dim

    def _check_rope_scaling(self) -> None:
        scaling = self.rope_scaling
        if scaling and self.positions != "rope":
            raise ValueError("rope_scaling needs positions: rope")
        if isinstance(scaling, DynamicScaling) and self.rotary_dim < 4:
            raise ValueError(f"head_dim {self.rotary_dim} is too small for rope_scaling kind dynamic; nearest: 4")
        if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim and not self.latent:
            raise ValueError("rope_scaling.mscale_all_dim needs latent attention; what works: mscale_all_dim: 0")
        if isinstance(scaling, LongScaling):
            for field in ("short_factors", "long_factors"):
                count = len(getattr(scaling, field))
                if count != self.rotary_dim // 2:
                    raise ValueError(
                        f"rope_scaling.{field} has {count} numbers; one for each pair of head_dim {self.rotary_dim} is "
                        f"needed: {self.rotary_dim // 2}"
                    )
