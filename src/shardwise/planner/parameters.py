"""Parameter counts from a Model's dimensions; tests hold them equal to the instantiated module's."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec import Model


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters by part. `head` is 0 where it is tied to the embedding."""

    embedding: int
    positions: int
    attention: int  # all layers
    mlp: int  # all layers
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.attention + self.mlp + self.norms + self.head


def count_parameters(model: Model) -> ParameterCount:
    """Exact count, biases and norms included."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    ups = 2 if model.activation == "swiglu" else 1
    attention = model.hidden * (queries + 2 * keys) + queries * model.hidden
    mlp = (ups + 1) * model.hidden * model.ffn
    if model.bias:
        attention += queries + 2 * keys + model.hidden
        mlp += ups * model.ffn + model.hidden
    norm = model.hidden * (2 if model.norm == "layernorm" and model.bias else 1)
    qk_norms = 2 * model.head_dim if model.qk_norm else 0
    return ParameterCount(
        embedding=model.vocabulary * model.hidden,
        positions=model.max_sequence * model.hidden if model.positions == "learned" else 0,
        attention=model.layers * attention,
        mlp=model.layers * mlp,
        norms=model.layers * (2 * norm + qk_norms) + norm,
        head=0 if model.tied else model.vocabulary * model.hidden,
    )


def matmul_parameters(model: Model) -> int:
    """Weights that every token is multiplied with: projections and the output head, tied or not; no biases,
    norms, embedding or position look-ups."""
    bare = count_parameters(model.model_copy(update={"bias": False}))
    return bare.attention + bare.mlp + model.vocabulary * model.hidden
