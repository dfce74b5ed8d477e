"""Model FLOPs: the one formula behind every MFU that shardwise prints.

Per token, forward and backward (backward = 2 × forward; PaLM, arXiv 2204.02311, appendix B):

    6 · N_matmul  +  6 · L · H · (d_qk + d_v) · S · c

N_matmul: weights that each token is multiplied with (output head yes, embedding look-up no). d_qk, d_v: sizes of a
head's query and value, equal but for latent attention. c: share of the S × S scores that is computed. Causal attention
needs (S + 1) / 2S of them, and that is what `mfu` counts; `mfu_full_attention` counts c = 1, as torchtitan, nanoGPT and
Llama-3's paper do.
"""

from __future__ import annotations

from shardwise.planner.parameters import matmul_parameters
from shardwise.planner.recompute import Recompute
from shardwise.spec import Model


def attention_flops_per_token(model: Model, sequence: int, *, causal: bool = True) -> float:
    """FLOPs of scores and weighted values, forward and backward, all layers."""
    share = (sequence + 1) / (2 * sequence) if causal else 1.0
    latent = model.latent
    sizes = latent.nope_dim + latent.rope_dim + latent.value_dim if latent else 2 * model.head_dim
    return 6 * model.layers * model.heads * sizes * sequence * share


def model_flops_per_token(model: Model, sequence: int, *, causal: bool = True) -> float:
    """FLOPs that one token of a sequence of `sequence` tokens needs, forward and backward, nothing recomputed."""
    return 6 * matmul_parameters(model) + attention_flops_per_token(model, sequence, causal=causal)


def recomputed_flops_per_token(model: Model, sequence: int, again: Recompute) -> float:
    """FLOPs that a recompute policy adds: of the blocks' products and of attention, each a third of its forward and
    backward."""
    blocks = 2 * (matmul_parameters(model) - model.vocabulary * model.hidden)
    return again.gemm * blocks + again.attention * attention_flops_per_token(model, sequence) / 3
