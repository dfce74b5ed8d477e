"""Logits and weights of transformers' own models, in both directions."""

import json
import struct
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from shardwise.model.decoder import Decoder
from shardwise.model.huggingface import NAMINGS, ImportedWeights, their_names, their_shapes, to_theirs
from shardwise.model.weight_files import WeightFiles, write_weights
from shardwise.spec import InputError, Model
from shardwise.spec.huggingface import load_model_config, model_config

VOCABULARY, SEQUENCE = 97, 64
DIMENSIONS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": SEQUENCE,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
}
LLAMA = {"model_type": "llama", **DIMENSIONS}

QWEN3_MOE = {
    **DIMENSIONS,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
DEEPSEEK = {
    **DIMENSIONS,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}


def scaled(rope_type: str, **fields) -> dict:
    return {**LLAMA, "rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **fields}}


CONFIGS = {
    "gpt2": GPT2,
    "gpt2, untied": {**GPT2, "tie_word_embeddings": False, "n_inner": 100},
    "llama": LLAMA,
    "llama, biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama, tied": {**LLAMA, "tie_word_embeddings": True, "head_dim": 12},
    "llama, ungrouped": {**LLAMA, "num_key_value_heads": 6},
    "linear": scaled("linear", factor=2.0),
    "dynamic": scaled("dynamic", factor=2.0),
    "yarn": scaled("yarn", factor=4.0, original_max_position_embeddings=16),
    "longrope": scaled(
        "longrope", factor=2.0, original_max_position_embeddings=32,
        short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 3.0, 4.0, 5.0],
    ),
    "llama3": scaled(
        "llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "mistral": {**DIMENSIONS, "model_type": "mistral", "sliding_window": 40},
    "qwen2": {**DIMENSIONS, "model_type": "qwen2"},
    "qwen3": {**DIMENSIONS, "model_type": "qwen3", "head_dim": 16},
    "mixtral": {**DIMENSIONS, "model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {**QWEN3_MOE, "norm_topk_prob": True},
    "qwen3_moe, dense layers": {**QWEN3_MOE, "mlp_only_layers": [0], "tie_word_embeddings": True},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, full queries": {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3, one group": {
        **DEEPSEEK,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "norm_topk_prob": False, "routed_scaling_factor": 0.7,
    },
    "deepseek_v3, yarn": {
        **DEEPSEEK,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "mscale": 0.7, "mscale_all_dim": 1.3,
        },
    },
}  # fmt: skip
LONGER = {
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "qwen2",
    "deepseek_v3, yarn",
}  # tried beyond max_position_embeddings, too


def theirs(config: dict) -> transformers.PreTrainedModel:
    """A random model with weights large enough to make every term count."""
    config = transformers.AutoConfig.for_model(**config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.2).add_(1.0 if "norm" in name or "ln_" in name else 0.0)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2)
    return model


def imported(directory) -> tuple[Model, ImportedWeights]:
    model = load_model_config(directory)
    family = json.loads((directory / "config.json").read_text())["model_type"]
    return model, ImportedWeights(model, NAMINGS[family], WeightFiles(directory))


def decoder_of(model: Model, weights: ImportedWeights, dtype=torch.float32) -> Decoder:
    decoder = Decoder(model, dtype).to(dtype)
    decoder.load_state_dict({name: weights.load(name) for name in weights.shapes})
    return decoder


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_weights(tmp_path, name):
    model = theirs(CONFIGS[name])
    model.save_pretrained(tmp_path)
    ours, weights = imported(tmp_path)
    decoder = decoder_of(ours, weights)
    for length in (1, 13, 40, *([80] if name in LONGER else [])):
        ids = torch.randint(VOCABULARY, (2, length))
        with torch.no_grad():
            expected = model(ids).logits
            assert (decoder(ids) - expected).abs().max() <= 1e-5
        assert expected.std() > 0.1

    naming = NAMINGS[model_config(ours)["model_type"]]
    stored = load_file(tmp_path / "model.safetensors")
    back = {
        their: tensor
        for own in weights.shapes
        for their, tensor in zip(
            their_names(ours, naming, own), to_theirs(ours, naming, own, weights.load(own)), strict=True
        )
    }
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[their], stored[their]) for their in stored)


class DoubleForFloat(TorchFunctionMode):
    """fp64 wherever fp32 is asked for: transformers takes norms, RoPE and routers in fp32, whatever the type."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        double = {torch.float32: torch.float64}
        arguments = [double.get(a, a) if isinstance(a, torch.dtype) else a for a in arguments]
        named = {key: double.get(a, a) if isinstance(a, torch.dtype) else a for key, a in (named or {}).items()}
        return function(*arguments, **named)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_fp64(tmp_path, name):
    with DoubleForFloat():
        model = theirs(CONFIGS[name]).double()
    model.save_pretrained(tmp_path)
    decoder = decoder_of(*imported(tmp_path), dtype=torch.float64)
    ids = torch.randint(VOCABULARY, (2, 40))
    with torch.no_grad():
        logits = decoder(ids)
        with DoubleForFloat():
            assert (logits - model(ids).logits).abs().max() <= 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_opens_what_is_written(tmp_path, name):
    """Our model → files → transformers, in files of one size or another."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    ours = load_model_config(tmp_path)
    decoder = Decoder(ours).eval()
    torch.manual_seed(1)
    own_tensors = decoder.state_dict()
    for tensor in own_tensors.values():
        tensor.normal_(std=0.2)
    config = model_config(ours)
    naming = NAMINGS[config["model_type"]]
    shapes, tensors = {}, []
    for own, tensor in own_tensors.items():
        shapes |= zip(their_names(ours, naming, own), their_shapes(ours, naming, own, tensor.shape), strict=True)
        tensors += to_theirs(ours, naming, own, tensor)
    write_weights(tmp_path, shapes, tensors, dtype="fp32", max_shard_bytes=20_000 if name == "llama" else 10**9)
    assert (tmp_path / "model.safetensors.index.json").exists() == (name == "llama")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values())
    ids = torch.randint(VOCABULARY, (2, 40))
    with torch.no_grad():
        assert (model(ids).logits - decoder(ids)).abs().max() <= 1e-5


def test_files_are_as_large_as_allowed(tmp_path):
    shapes = {name: torch.Size((100,)) for name in "abcde"}
    tensors = [torch.full((100,), float(index)) for index in range(5)]
    write_weights(tmp_path, shapes, tensors, dtype="bf16", max_shard_bytes=400)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [sorted(load_file(file)) for file in files] == [["a", "b"], ["c", "d"], ["e"]]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 500, "total_size": 1000}
    assert index["weight_map"]["d"] == files[1].name
    assert load_file(files[2])["e"].dtype == torch.bfloat16
    assert WeightFiles(tmp_path).load("d").unique().tolist() == [3.0]


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    alive = weakref.WeakSet()

    def tensors():
        for _ in range(6):
            assert len(alive) == 0
            tensor = torch.zeros(10, 10)
            alive.add(tensor)
            yield tensor
            del tensor

    write_weights(tmp_path, {str(n): torch.Size((10, 10)) for n in range(6)}, tensors(), dtype="fp32",
                  max_shard_bytes=1000)  # fmt: skip


@pytest.fixture
def llama(tmp_path):
    model = theirs(LLAMA)
    model.save_pretrained(tmp_path)
    return tmp_path


def change(directory, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is unexpected"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight is \[3\], but \[48\] is needed",
        ),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.1" in name], "is missing; .*; and 4 more"),
    ],
)
def test_weights_that_are_not_those_of_the_config(llama, edit, message):
    change(llama, edit)
    with pytest.raises(InputError, match=message):
        imported(llama)


def test_a_stored_copy_of_a_tied_head(tmp_path):
    theirs({**LLAMA, "tie_word_embeddings": True}).save_pretrained(tmp_path)
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "head.weight" not in imported(tmp_path)[1].shapes
    change(tmp_path, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(InputError, match=r"lm_head.weight differs from model.embed_tokens.weight, but tie_word_emb"):
        imported(tmp_path)


def test_names_and_buffers_of_older_files(tmp_path):
    """The published GPT-2 leaves the prefix out and holds the causal mask."""
    model = theirs(GPT2)
    model.save_pretrained(tmp_path)
    before = decoder_of(*imported(tmp_path))

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    change(tmp_path, rename)
    after = decoder_of(*imported(tmp_path))
    ids = torch.randint(VOCABULARY, (1, 9))
    assert torch.equal(before(ids), after(ids))


def test_files_that_cannot_be_used(llama):
    path = llama / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"model.safetensors: is damaged or cannot be read"):
        imported(llama)
    path.write_bytes(struct.pack("<Q", 10**9) + content[8:])
    with pytest.raises(InputError, match=r"model.safetensors: is damaged or cannot be read"):
        imported(llama)
    path.unlink()
    with pytest.raises(InputError, match=r"has neither model.safetensors nor"):
        imported(llama)
    (llama / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match=r"has pytorch_model.bin, a pickle.*save_pretrained"):
        imported(llama)
    index = llama / "model.safetensors.index.json"
    for text, message in {
        "{": "is damaged",
        '{"weight_map": []}': "is damaged",
        '{"weight_map": {"a": "../x.safetensors"}}': "outside of its directory",
        '{"weight_map": {"a": "x.safetensors"}}': "x.safetensors: no such file, although",
    }.items():
        index.write_text(text)
        with pytest.raises(InputError, match=message):
            imported(llama)


def test_quantized_weights_are_refused(llama):
    change(llama, lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    _, weights = imported(llama)
    with pytest.raises(InputError, match=r"model.norm.weight is torch.int8: quantized"):
        weights.load("norm.weight")
