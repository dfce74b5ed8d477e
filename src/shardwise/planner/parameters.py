"""Parameter counts from a Model's dimensions; tests hold them equal to the instantiated module's."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec import Layout, Model


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters by part. `head` is 0 where it is tied to the embedding; `idle` are those of the routed
    experts that a token does not go through."""

    embedding: int
    positions: int
    attention: int  # all layers
    mlp: int  # all layers, experts and routers included
    norms: int
    head: int
    idle: int = 0

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.attention + self.mlp + self.norms + self.head

    @property
    def active(self) -> int:
        """What one token goes through, the embedding table included."""
        return self.total - self.idle


def count_parameters(model: Model) -> ParameterCount:
    """Exact count; biases, also those of routers that no gradient trains, and norms included."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = attention_parameters(model) + model.attention_sinks * model.heads
    attention += model.qkv_bias * (queries + 2 * keys) + model.out_bias * model.hidden
    norm = model.hidden * (2 if model.norm_bias else 1)
    inner_norms = 2 * model.head_dim if model.qk_norm else 0
    if model.latent:
        inner_norms += model.latent.query_rank + model.latent.kv_rank
    every = range(model.layers)
    return ParameterCount(
        embedding=model.vocabulary * model.hidden,
        positions=model.max_sequence * model.hidden if model.positions == "learned" else 0,
        attention=model.layers * attention,
        mlp=sum(_mlp(model, layer, active=False) for layer in every),
        norms=model.layers * (2 * norm + inner_norms) + norm,
        head=0 if model.tied else model.vocabulary * model.hidden,
        idle=sum(_mlp(model, layer, active=False) - _mlp(model, layer, active=True) for layer in every),
    )


def _mlp(model: Model, layer: int, *, active: bool) -> int:
    """`mlp_parameters` with the biases."""
    weights, ups = mlp_parameters(model, layer, active=active), 2 if model.activation == "swiglu" else 1
    if model.experts is None or layer < model.experts.dense_layers:
        return weights + model.mlp_bias * (ups * model.ffn + model.hidden)
    experts = model.experts
    gates = experts.router_bias * experts.count + experts.shared_gate * model.hidden
    through = experts.top_k if active else experts.count
    return weights + gates + model.mlp_bias * through * (ups * experts.ffn + model.hidden)


def matmul_parameters(model: Model) -> int:
    """Weights that every token is multiplied with: projections, the experts it is routed to, and the output head, tied
    or not; no biases, norms, embedding or position look-ups."""
    blocks = sum(mlp_parameters(model, layer, active=True) for layer in range(model.layers))
    return model.layers * attention_parameters(model) + blocks + model.vocabulary * model.hidden


def attention_parameters(model: Model) -> int:
    """Projection weights of one layer's attention, without biases and norms."""
    if model.latent:
        latent = model.latent
        query = model.heads * (latent.nope_dim + latent.rope_dim)
        queries = latent.query_rank * (model.hidden + query) if latent.query_rank else model.hidden * query
        keys = model.hidden * (latent.kv_rank + latent.rope_dim)
        keys += latent.kv_rank * model.heads * (latent.nope_dim + latent.value_dim)
        return queries + keys + model.heads * latent.value_dim * model.hidden
    return model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)


def mlp_parameters(model: Model, layer: int, *, active: bool = False) -> int:
    """Projection weights of one layer's MLP or experts; `active`: those that one token goes through."""
    each = (3 if model.activation == "swiglu" else 2) * model.hidden
    if model.experts is None or layer < model.experts.dense_layers:
        return each * model.ffn
    experts = model.experts
    routed = (experts.top_k if active else experts.count) * experts.ffn
    return each * (routed + experts.shared_ffn) + model.hidden * experts.count


def layer_parameters(model: Model, layout: Layout, layer: int) -> float:
    """Projection weights of one layer that one rank computes with, before any sharding over data ranks: tensor
    parallelism divides all, expert parallelism the routed experts."""
    mlp = mlp_parameters(model, layer)
    if model.experts and layer >= model.experts.dense_layers and layout.ep > 1:
        each = (3 if model.activation == "swiglu" else 2) * model.hidden
        routed = each * model.experts.count * model.experts.ffn
        return (attention_parameters(model) + mlp - routed) / layout.tp + routed / layout.ep
    return (attention_parameters(model) + mlp) / layout.tp


def outer_parameters(model: Model, layout: Layout) -> float:
    """Embedding and head on the fullest pipeline end."""
    tables = 1 if model.tied or layout.pp > 1 else 2
    return tables * model.vocabulary * model.hidden / layout.tp
