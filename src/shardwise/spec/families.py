"""What transformers calls the parts of a Model: one table per `model_type`, read in both directions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    fields: key -> the Model fields that it sets (those of its experts as `experts.count`). fixed: Model fields that all
    of the family have. defaults: what transformers takes where a key is absent; a key without one is required.
    only: keys that change the computation, with the values that shardwise computes, the usual one first.
    special: as fields, but translated by a rule of the family's own in `spec/huggingface.py`.
    aliases: other spelling -> key. inert: keys that change nothing in this family. theta: RoPE's base by default.
    """

    architecture: str
    fields: dict[str, tuple[str, ...]]
    fixed: dict[str, Any]
    defaults: dict[str, Any]
    only: dict[str, tuple[Any, ...]]
    special: dict[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    theta: float = 10_000.0


_OFF = (False, None)
_ONLY: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": _OFF,
    "add_cross_attention": _OFF,
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "auto_map": (None,),  # code of the model's own
    "per_layer_config": (None,),
    "rope_interleaved": _OFF,
    "use_mrope": _OFF,
}
_GPT2 = Family(
    architecture="GPT2LMHeadModel",
    fields={
        "n_layer": ("layers",),
        "n_embd": ("hidden",),
        "n_head": ("heads",),
        "n_inner": ("ffn",),
        "vocab_size": ("vocabulary",),
        "n_positions": ("max_sequence",),
        "layer_norm_epsilon": ("norm_eps",),
        "tie_word_embeddings": ("tied",),
    },
    fixed={
        "positions": "learned",
        "rope_scaling": None,
        "norm": "layernorm",
        "activation": "gelu",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "qk_norm": False,
        "sliding_window": None,
    },
    defaults={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    only={
        **_ONLY,
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": _OFF,
        "reorder_and_upcast_attn": _OFF,
    },
)
_FIELDS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("layers",),
    "hidden_size": ("hidden",),
    "num_attention_heads": ("heads",),
    "num_key_value_heads": ("kv_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("ffn",),
    "vocab_size": ("vocabulary",),
    "max_position_embeddings": ("max_sequence",),
    "rms_norm_eps": ("norm_eps",),
    "tie_word_embeddings": ("tied",),
}
_FIXED = {
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "qk_norm": False,
}
_DEFAULTS = {"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_ROPE_ONLY = {**_ONLY, "hidden_act": ("silu", "swish"), "partial_rotary_factor": (1, None)}


def _without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


_BIASES = {"attention_bias": ("qkv_bias", "out_bias")}
_SOFTMAX = {"experts.router": "softmax", "experts.router_bias": False}
FAMILIES = {
    "gpt2": _GPT2,
    "llama": Family(
        architecture="LlamaForCausalLM",
        fields={**_FIELDS, **_BIASES, "mlp_bias": ("mlp_bias",)},
        fixed={**_without(_FIXED, "qkv_bias", "out_bias", "mlp_bias"), "sliding_window": None},
        defaults={**_DEFAULTS, "attention_bias": False, "mlp_bias": False},
        only={**_ROPE_ONLY, "sliding_window": (None,), "use_sliding_window": _OFF},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        fields={**_FIELDS, "sliding_window": ("sliding_window",)},
        fixed=_FIXED,
        defaults={**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        only=_ROPE_ONLY,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        fields=_FIELDS,
        fixed={**_FIXED, "qkv_bias": True},
        defaults={**_DEFAULTS, "num_key_value_heads": 32},
        only=_ROPE_ONLY,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        fields={**_FIELDS, **_BIASES},
        fixed={**_without(_FIXED, "qkv_bias", "out_bias"), "qk_norm": True},
        defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
        only=_ROPE_ONLY,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        fields={
            **_FIELDS,
            "intermediate_size": ("experts.ffn", "ffn"),  # no layer has another MLP
            "num_local_experts": ("experts.count",),
            "num_experts_per_tok": ("experts.top_k",),
            "sliding_window": ("sliding_window",),
        },
        fixed={**_FIXED, **_SOFTMAX, "experts.normalized": True},
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        only={**_ROPE_ONLY, "router_jitter_noise": (0.0, None)},
        theta=1_000_000.0,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        fields={
            **_FIELDS,
            **_BIASES,
            "num_experts": ("experts.count",),
            "num_experts_per_tok": ("experts.top_k",),
            "moe_intermediate_size": ("experts.ffn",),
            "norm_topk_prob": ("experts.normalized",),
        },
        fixed={**_without(_FIXED, "qkv_bias", "out_bias"), **_SOFTMAX, "qk_norm": True, "sliding_window": None},
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        only={**_ROPE_ONLY, "decoder_sparse_step": (1,), "use_sliding_window": _OFF},
        special={"mlp_only_layers": ("experts.dense_layers",)},
        aliases={"num_local_experts": "num_experts"},
        inert=("sliding_window", "max_window_layers"),  # without use_sliding_window
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        fields={
            **_without(_FIELDS, "num_key_value_heads", "head_dim"),
            "q_lora_rank": ("latent.query_rank",),
            "kv_lora_rank": ("latent.kv_rank",),
            "qk_nope_head_dim": ("latent.nope_dim",),
            "qk_rope_head_dim": ("latent.rope_dim",),
            "v_head_dim": ("latent.value_dim",),
            "n_routed_experts": ("experts.count",),
            "num_experts_per_tok": ("experts.top_k",),
            "moe_intermediate_size": ("experts.ffn",),
            "first_k_dense_replace": ("experts.dense_layers",),
            "n_group": ("experts.groups",),
            "topk_group": ("experts.top_groups",),
            "norm_topk_prob": ("experts.normalized",),
            "routed_scaling_factor": ("experts.scale",),
        },
        fixed={**_FIXED, "sliding_window": None, "experts.router": "sigmoid", "experts.router_bias": True},
        defaults={
            **_without(_DEFAULTS, "num_key_value_heads", "head_dim"),
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        only={
            **_without(_ROPE_ONLY, "auto_map", "quantization_config"),
            "attention_bias": _OFF,
            "rope_interleave": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        special={"n_shared_experts": ("experts.shared_ffn",), "num_key_value_heads": ()},
        aliases={"num_local_experts": "n_routed_experts"},
        # The published files have code of their own beside that of transformers, and weights in fp8, which
        # `model/weight_files.py` refuses. transformers derives the head dimensions from those above. Further tokens are
        # predicted by modules of their own.
        inert=(
            *("auto_map", "quantization_config", "head_dim", "qk_head_dim"),
            *("num_nextn_predict_layers", "num_mtp_layers", "aux_loss_alpha", "seq_aux", "ep_size"),
        ),
    ),
}
QWEN_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
ROPE_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_sequence",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale_all_dim": "mscale_all_dim",
}
# What changes nothing in a forward pass: bookkeeping, special tokens, sampling, initial weights, the loss that balances
# experts (recipe.balance), and dropout (which shardwise does not do).
_NOTHING = """
architectures model_type torch_dtype dtype transformers_version transformers.js_config _name_or_path name_or_path
_commit_hash _attn_implementation_autoset attn_implementation use_cache initializer_range pretraining_tp
is_llama_config is_decoder n_ctx gradient_checkpointing chunk_size_feed_forward torchscript use_bfloat16
tf_legacy_loss tie_encoder_decoder finetuning_task task_specific_params problem_type tokenizer_class prefix
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
id2label label2id num_labels output_attentions output_hidden_states output_scores return_dict
router_aux_loss_coef output_router_logits
attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout
summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_new_tokens
"""
INERT = frozenset(_NOTHING.split())
