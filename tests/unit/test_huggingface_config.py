"""config.json to Model and back: nothing that changes the computation is passed over."""

import json

import pytest
import transformers

from shardwise.spec import InputError, Model, Run
from shardwise.spec.huggingface import load_model_config, model_config
from shardwise.spec.presets import model_names, model_preset
from shardwise.spec.trainable import require_trainable

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 100}

DEEPSEEK = {**LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4}


@pytest.fixture
def load(tmp_path):
    def load(config: dict) -> Model:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return load_model_config(tmp_path)

    return load


def of(family: str, **changes) -> dict:
    return {**LLAMA, "model_type": family, **changes}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (LLAMA, {"kv_heads": 2, "head_dim": 16, "norm_eps": 1e-6, "rope_theta": 10_000, "tied": False}),
        (of("llama", num_key_value_heads=None), {"kv_heads": 4}),
        (of("llama", head_dim=32), {"head_dim": 32}),
        (of("llama", attention_bias=True), {"qkv_bias": True, "out_bias": True, "mlp_bias": False}),
        (of("llama", mlp_bias=True, tie_word_embeddings=True), {"qkv_bias": False, "mlp_bias": True, "tied": True}),
        (of("llama", rope_theta=5e5), {"rope_theta": 500_000}),
        (of("llama", rope_parameters={"rope_type": "default", "rope_theta": 7}), {"rope_theta": 7}),
        (of("mistral"), {"sliding_window": 4096}),
        (of("mistral", sliding_window=None), {"sliding_window": None}),
        (of("mistral", sliding_window=64), {"sliding_window": 64}),
        (of("qwen2"), {"qkv_bias": True, "out_bias": False, "sliding_window": None}),
        (of("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=0), {"sliding_window": 64}),
        (of("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=2), {"sliding_window": None}),
        (of("qwen2", use_sliding_window=False, sliding_window=64, max_window_layers=0), {"sliding_window": None}),
        (of("qwen3"), {"qk_norm": True, "head_dim": 128}),
        (of("qwen3", head_dim=16, layer_types=["full_attention"] * 2), {"head_dim": 16, "sliding_window": None}),
        (GPT2, {"ffn": 256, "tied": True, "norm": "layernorm", "norm_bias": True, "positions": "learned"}),
        ({**GPT2, "n_inner": 100, "activation_function": "gelu_pytorch_tanh"}, {"ffn": 100, "activation": "gelu"}),
        (of("mixtral"), {"ffn": 96, "rope_theta": 1_000_000, "qk_norm": False, "norm_eps": 1e-5, "latent": None}),
        (of("mixtral", sliding_window=64), {"sliding_window": 64}),
        (of("qwen3_moe", num_experts=16, sliding_window=9, max_window_layers=2), {"qk_norm": True, "ffn": 96}),
        ({**GPT2, "tie_word_embeddings": False, "resid_pdrop": 0.1, "n_ctx": 128}, {"tied": False}),
    ],
)
def test_fields(load, config, fields):
    model = load(config)
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (of("mixtral", num_local_experts=4), {"count": 4, "top_k": 2, "ffn": 96, "normalized": True}),
        (of("mixtral"), {"count": 8, "top_k": 2, "router": "softmax"}),
        (of("qwen3_moe"), {"count": 128, "top_k": 8, "ffn": 768, "normalized": False, "dense_layers": 0}),
        (of("qwen3_moe", num_experts=16, moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[0]),
         {"count": 16, "ffn": 24, "normalized": True, "dense_layers": 1}),
        (of("qwen3_moe", num_local_experts=16), {"count": 16}),
        (DEEPSEEK, {"count": 256, "top_k": 8, "ffn": 2048, "shared_ffn": 2048, "dense_layers": 3, "router": "sigmoid",
                    "router_bias": True, "groups": 8, "top_groups": 4, "scale": 2.5, "normalized": True}),
        ({**DEEPSEEK, "n_shared_experts": 2, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2},
         {"shared_ffn": 48, "groups": 4, "top_groups": 2}),
    ],
)  # fmt: skip
def test_fields_of_experts(load, config, experts):
    found = load(config).experts
    assert {name: getattr(found, name) for name in experts} == experts


def test_fields_of_latent_attention(load):
    latent = {"query_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    assert load(DEEPSEEK).latent.dump() == latent
    assert load({**DEEPSEEK, "q_lora_rank": None}).latent.query_rank == 0
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn = load({**DEEPSEEK, "rope_scaling": scaling}).rope_scaling
    assert (yarn.attention_factor, yarn.mscale_all_dim) == (1.0, 1.0)
    assert load(of("llama", rope_scaling=scaling)).rope_scaling.mscale_all_dim == 0  # DeepSeek's own attention only


def test_the_published_config_of_deepseek_v3(load):
    """Its values beside the dimensions; https://huggingface.co/deepseek-ai/DeepSeek-V3 config.json."""
    published = {
        "aux_loss_alpha": 0.001,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8"},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
        "hidden_size": 7168, "intermediate_size": 18432, "vocab_size": 129280, "max_position_embeddings": 163840,
        "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
    }  # fmt: skip
    model = load({"model_type": "deepseek_v3", **published})
    assert model.model_copy(update={"name": "deepseek-v3"}) == model_preset("deepseek-v3")


def test_absent_heads_are_those_of_transformers(load):
    """Its families disagree on how many key-value heads there are where none are given."""
    for family, count in {"llama": 32, "mistral": 8, "qwen2": 32}.items():
        config = of(family, num_attention_heads=32)
        del config["num_key_value_heads"]
        assert load(config).kv_heads == count
        assert transformers.AutoConfig.for_model(**config).num_key_value_heads == count


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"type": "linear", "factor": 2}, {"kind": "linear", "factor": 2}),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}, {"kind": "linear"}),
        ({"rope_type": "yarn", "factor": 4.0}, {"original_sequence": 128, "attention_factor": None}),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32, "beta_fast": 0},
            {"factor": 4, "beta_fast": 32},
        ),
        ({"rope_type": "yarn", "factor": 8, "mscale": 0.7, "mscale_all_dim": 0.7}, {"attention_factor": 1}),
        ({"rope_type": "yarn", "factor": 8, "mscale": 0.7}, {"attention_factor": None}),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1] * 8,
                "long_factor": [2] * 8,
                "original_max_position_embeddings": 32,
            },
            {"factor": 4, "long_factors": (2,) * 8},
        ),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
            {"original_sequence": 128},
        ),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_in_both_spellings(load, key, given, fields):
    scaling = load(of("llama", **{key: given})).rope_scaling
    assert {name: getattr(scaling, name) for name in fields} == fields


def test_the_original_context_may_stand_beside_the_scaling(load):
    given = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    config = of("llama", rope_scaling=given, original_max_position_embeddings=32)
    assert load(config).rope_scaling.original_sequence == 32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type '' is none of the families that shardwise reads .gpt2, llama, mistral, qwen2, qwen3"),
        (of("lama"), "model_type 'lama' .*nearest: llama"),
        (of("gemma2"), "model_type 'gemma2' is none of"),
        (of("llama", hidden_act="gelu"), 'hidden_act "gelu" is not something .* works: "silu"'),
        ({**GPT2, "activation_function": "gelu"}, 'works: "gelu_new" or "gelu_pytorch_tanh"'),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights false .* works: true"),
        ({**GPT2, "reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        (of("llama", quantization_config={"bits": 4}), "quantization_config"),
        (of("llama", auto_map={"AutoModel": "x.Y"}), "auto_map"),
        (of("llama", sliding_window=64), "sliding_window 64 .* works: null"),
        (of("llama", partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        (of("llama", rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor other than 1"),
        (of("llama", attention_multiplier=0.1), "unknown field 'attention_multiplier' of a llama"),
        (of("llama", rope_theeta=1), "unknown field 'rope_theeta' of a llama; did you mean 'rope_theta'"),
        (of("mistral", mlp_bias=True), "unknown field 'mlp_bias' of a mistral"),
        (of("qwen2", attention_bias=False), "unknown field 'attention_bias' of a qwen2"),
        (of("qwen2", use_sliding_window=True, max_window_layers=1), "on all layers or on none"),
        (of("qwen3", layer_types=["sliding_attention"] * 2), "on all layers or on none"),
        (of("qwen3", layer_types=["full_attention"]), "on all layers or on none"),
        (of("qwen2", num_hidden_layers="two"), "num_hidden_layers: a number is expected .it was 'two'"),
        (of("qwen2", max_window_layers="two"), "max_window_layers: a number is expected"),
        (of("llama", hidden_size=None), "hidden_size is required"),
        (of("llama", tie_word_embeddings="yes"), "tie_word_embeddings: true or false is expected"),
        (of("llama", num_key_value_heads=3), "kv_heads 3 does not divide heads 4; nearest: 2"),
        (of("llama", rope_scaling={"type": "yarm", "factor": 2}), "unknown rope_type 'yarm'; did you mean 'yarn'"),
        (of("llama", rope_scaling={"type": "mrope", "rope_type": "default"}), "unknown rope_type 'mrope'"),
        (of("llama", rope_scaling={"rope_type": "linear"}), "rope_scaling.linear.factor: is required"),
        (of("llama", rope_scaling={"rope_type": "linear", "factor": 2, "beta_fast": 1}), "unknown field 'beta_fast'"),
        (of("llama", rope_scaling={"factor": 2}), "rope_type is default, but 'factor' is given"),
        (of("mixtral", router_jitter_noise=0.1), "router_jitter_noise 0.1 .* works: 0.0"),
        (of("mixtral", num_experts_per_tok=9), "top_k 9 is more than the 8 experts; nearest: 8"),
        (of("qwen3_moe", decoder_sparse_step=2), "decoder_sparse_step 2 .* works: 1"),
        (of("qwen3_moe", mlp_only_layers=[1]), "dense layers before all those with experts only"),
        (of("qwen3_moe", use_sliding_window=True), "use_sliding_window true .* works: false"),
        (of("qwen3_moe", num_experts=4, num_local_experts=5), "num_experts and num_local_experts are both given"),
        ({**DEEPSEEK, "num_key_value_heads": 2}, "num_key_value_heads 2 is not num_attention_heads 4"),
        ({**DEEPSEEK, "rope_interleave": False}, "rope_interleave false .* works: true"),
        ({**DEEPSEEK, "attention_bias": True}, "attention_bias true"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, 'scoring_func "softmax" .* works: "sigmoid"'),
        ({**DEEPSEEK, "n_group": 3}, "groups 3 does not divide the 256 experts; nearest: 2"),
        ({**DEEPSEEK, "topk_group": 9}, "top_groups 9 is more than the 8 groups; nearest: 8"),
        ({**DEEPSEEK, "n_group": 64, "topk_group": 1}, "top_k 8 is more than the 4 experts of 1 groups; nearest: 4"),
        (of("llama", rope_scaling="linear"), "rope_scaling: a mapping is expected"),
        (of("llama", rope_scaling={"rope_type": "yarn", "factor": "x"}), "numbers are expected: factor 'x'"),
        (of("llama", rope_theta=3, rope_parameters={"rope_theta": 4}), "rope_theta is 3 and, in rope_parameters, 4"),
        (of("llama", rope_scaling={"type": "linear"}, rope_parameters={"rope_theta": 4}), "both given, and differ"),
    ],
)
def test_what_is_refused(load, tmp_path, config, message):
    with pytest.raises(InputError, match=message) as caught:
        load(config)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(InputError, match=r"config.json: no such file"):
        load_model_config(tmp_path)
    for text, message in {"{": "not valid JSON", "[]": "a mapping is expected"}.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            load_model_config(tmp_path / "config.json")


@pytest.mark.parametrize("name", [name for name in model_names() if not name.startswith("gpt-oss")])
def test_presets_survive_the_way_through_transformers(tmp_path, name):
    """Model → our config.json → transformers → its config.json → Model."""
    model = model_preset(name)
    (tmp_path / "config.json").write_text(json.dumps(model_config(model)))
    assert load_model_config(tmp_path).model_copy(update={"name": name}) == model
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert load_model_config(tmp_path / "again").model_copy(update={"name": name}) == model


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sliding_windows_survive_it_too(load, tmp_path, family):
    window = {"use_sliding_window": True, "max_window_layers": 0} if family != "mistral" else {}
    model = load(of(family, sliding_window=64, head_dim=16, **window))
    config = model_config(model)
    assert (config["model_type"], model.sliding_window) == (family, 64)
    assert load(config) == model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "layernorm", "norm_bias": True}, 'nearest: llama, but norm is "layernorm", not "rmsnorm"; norm_bias'),
        ({"qkv_bias": True, "mlp_bias": True}, "nearest: .* but "),
        (
            {"experts": {"count": 4, "top_k": 2, "ffn": 384, "shared_ffn": 384}},
            "nearest: mixtral, but experts.shared_ffn is 384, not 0",
        ),
        ({"qk_norm": True, "out_bias": True}, "nearest: qwen3, but qkv_bias and out_bias are not equal"),
    ],
)
def test_models_that_no_family_has(changes, message):
    with pytest.raises(InputError, match=message):
        model_config(Model.load(model_preset("tiny-llama").dump() | changes))


def test_a_run_may_name_a_config(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(of("mistral", sliding_window=64)))
    monkeypatch.chdir(tmp_path)
    others = {"cluster": {"gpu": "cpu"}, "layout": {}, "recipe": {"sequence": 32, "batch_tokens": 64, "steps": 1}}
    for name in ("mine", "mine/config.json", str(tmp_path / "mine")):
        run = Run.load({"model": name, **others})
        assert (run.model.name, run.model.hidden) == ("mine", 64)
        assert Run.load(run.dump()) == run
    assert Run.load({"model": {"preset": "mine", "layers": 1}, **others}).model.layers == 1
    require_trainable(run, 1)
    recipe = {**others["recipe"], "sequence": 128, "batch_tokens": 128}
    with pytest.raises(InputError, match="longer than model.sliding_window 64.*nearest: 64"):
        require_trainable(Run.load({"model": "mine", **others, "recipe": recipe}), 1)
    with pytest.raises(InputError, match=r"mine/confg.json: no such file"):
        Run.load({"model": "mine/confg.json", **others})
    with pytest.raises(InputError, match="unknown model preset 'my'"):
        Run.load({"model": "my", **others})
