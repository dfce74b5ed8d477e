"""The decoder's shapes, counts and positions, against the dimensions and against independent forms."""

import math

import pytest
import torch

from shardwise.model.cache import Cache
from shardwise.model.decoder import Decoder
from shardwise.model.generate import generate
from shardwise.model.init import initial_value
from shardwise.model.layers import Attention, rotate
from shardwise.model.rope import rotary_table
from shardwise.planner.flops import attention_flops_per_token, model_flops_per_token
from shardwise.planner.parameters import count_parameters
from shardwise.spec import Model
from shardwise.spec.presets import model_names, model_preset, published_parameters


def build(model: Model, dtype=torch.float64) -> Decoder:
    decoder = Decoder(model, compute_dtype=dtype).to(dtype)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(initial_value(model, name, parameter.shape, 0, "cpu"))
    return decoder


@pytest.mark.parametrize("name", [name for name in model_names() if not name.startswith("gpt-oss")])
def test_parameter_counts_equal_the_module_and_the_publication(name):
    model = model_preset(name)
    with torch.device("meta"):
        decoder = Decoder(model)
    instantiated = sum(tensor.numel() for tensor in decoder.state_dict().values())  # with the biases of routers
    assert count_parameters(model).total == instantiated
    if published_parameters(name):
        assert instantiated == published_parameters(name)


def test_counts_with_every_option_on():
    every = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_bias": True, "qk_norm": True, "tied": False}
    for option in ({name: value} for name, value in every.items()):
        for name, norm in (("tiny-llama", "layernorm"), ("tiny-gpt", "layernorm")):
            model = Model.load(model_preset(name).dump() | {"norm": norm} | option)
            assert count_parameters(model).total == sum(p.numel() for p in Decoder(model).parameters()), option
    model = Model.load(model_preset("tiny-llama").dump() | {"norm": "layernorm"} | every)
    assert count_parameters(model).total == sum(p.numel() for p in Decoder(model).parameters())


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-moe"])
def test_logits_do_not_see_the_future(name):
    decoder = build(model_preset(name))
    ids = torch.randint(320, (2, 24))
    changed = ids.clone()
    changed[:, 16:] = (changed[:, 16:] + 1) % 320
    before, after = decoder(ids), decoder(changed)
    assert before.shape == (2, 24, 320)
    torch.testing.assert_close(before[:, :16], after[:, :16])
    assert not torch.allclose(before[:, 16:], after[:, 16:])


def test_grouped_attention_equals_attention_with_repeated_heads():
    """GQA in the fused, group-ordered projection against separate projections and explicit softmax."""
    model = model_preset("tiny-llama").model_copy(update={"positions": "learned"})
    attention = Attention(model).double()
    x = torch.randn(2, 8, model.hidden, dtype=torch.float64)
    rows = attention.qkv.weight.view(model.kv_heads, -1, model.head_dim, model.hidden)
    per_group = model.heads // model.kv_heads
    wq = rows[:, :per_group].reshape(-1, model.hidden)
    wk = rows[:, per_group].repeat_interleave(per_group, 0).reshape(-1, model.hidden)
    wv = rows[:, per_group + 1].repeat_interleave(per_group, 0).reshape(-1, model.hidden)
    q, k, v = ((x @ w.T).view(2, 8, model.heads, -1).transpose(1, 2) for w in (wq, wk, wv))
    scores = (q @ k.transpose(2, 3) / math.sqrt(model.head_dim)).masked_fill(
        torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf
    )
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ attention.out.weight.T
    torch.testing.assert_close(attention(x, None), expected)


def test_rotation_is_relative():
    """The score of a rotated query and key depends on the distance between their positions only."""
    model = model_preset("tiny-llama")
    q, k = torch.randn(2, 1, 1, 1, model.head_dim, dtype=torch.float64)

    def score(at: int, other: int) -> float:
        table = rotary_table(model, torch.tensor([at, other]), 200, torch.float64)
        rotated = (rotate(x, *(part[i : i + 1] for part in table)) for i, x in enumerate((q, k)))
        return float(torch.mul(*rotated).sum())

    assert score(7, 3) == pytest.approx(score(107, 103))
    assert score(7, 3) != pytest.approx(score(7, 4))


def test_llama3_rope_scaling_keeps_short_and_stretches_long_wavelengths():
    model = model_preset("llama3.2-1b")
    plain = model.model_copy(update={"rope_scaling": None})
    one = torch.tensor([1])
    scaled, unscaled = (torch.atan2(*rotary_table(m, one, 2, torch.float64)[::-1])[0] for m in (model, plain))
    wavelength = 2 * math.pi / unscaled
    assert torch.equal(scaled[wavelength < 8192 / 4], unscaled[wavelength < 8192 / 4])
    torch.testing.assert_close(scaled[wavelength > 8192], unscaled[wavelength > 8192] / 32)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any()
    assert ((scaled < unscaled) & (scaled > unscaled / 32))[between].all()


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-moe"])
def test_a_cache_gives_the_logits_of_the_whole_text(name):
    decoder = build(model_preset(name))
    ids = torch.randint(320, (2, 12))
    cache = Cache(decoder.model.layers, capacity=12)
    parts = [decoder(ids[:, :7], cache=cache), *(decoder(ids[:, at : at + 1], cache=cache) for at in range(7, 12))]
    torch.testing.assert_close(torch.cat(parts, dim=1), decoder(ids))
    with pytest.raises(ValueError, match="2 tokens cannot be appended at once"):
        decoder(ids[:, :2], cache=cache)


def greedy_without_cache(decoder: Decoder, prompt: torch.Tensor, tokens: int, context: int) -> list[int]:
    ids = prompt
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat((ids, decoder(ids[None, -context:])[0, -1].argmax(keepdim=True)))
    return ids[len(prompt) :].tolist()


LONG = {"kind": "longrope", "factor": 4, "original_sequence": 16, "short_factors": [1] * 16, "long_factors": [3] * 16}


@pytest.mark.parametrize(
    ("name", "changes", "context"),
    [
        ("tiny-gpt", {}, 512),
        ("tiny-llama", {}, 2048),
        ("tiny-gpt", {"max_sequence": 20}, 20),  # the text grows beyond the context, which then slides
        ("tiny-llama", {"sliding_window": 20}, 20),
        ("tiny-llama", {"rope_scaling": LONG}, 2048),  # other frequencies from the 17th token on
        ("tiny-llama", {"rope_scaling": {"kind": "dynamic", "factor": 2}, "max_sequence": 20}, 20),
    ],
)
def test_greedy_generation_equals_recomputing_everything(name, changes, context):
    torch.manual_seed(0)
    decoder = build(Model.load(model_preset(name).dump() | {"tied": False} | changes))
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.2)  # so that each token differs from the last
    drawn = set()
    for length in (1, 9, 30):
        prompt = torch.randint(320, (length,))
        ids = list(generate(decoder, prompt, 24, temperature=0))
        assert ids == greedy_without_cache(decoder, prompt, 24, context)
        drawn |= {*ids}
    assert len(drawn) > 3


def test_generation_costs_one_position_a_token(monkeypatch):
    decoder = build(model_preset("tiny-llama"))
    seen = []
    decoder.blocks["0"].register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape[1]))
    list(generate(decoder, torch.randint(320, (9,)), 5))
    assert seen == [9, 1, 1, 1, 1]


def test_sampling_is_repeatable_and_draws_no_padding():
    decoder = build(model_preset("tiny-llama"))
    prompt = torch.randint(320, (4,))
    first, again, other = (list(generate(decoder, prompt, 40, seed=seed, top_k=None)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(token < 10 for token in generate(decoder, prompt, 40, vocabulary=10, top_k=None))


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama"])
def test_a_block_compiles_whole(name):
    decoder = build(model_preset(name), torch.float32)
    ids = torch.randint(320, (1, 8))
    expected = decoder(ids)
    for block in decoder.blocks.values():
        block.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(decoder(ids), expected)


def test_initial_weights_depend_on_seed_and_name_only():
    model = model_preset("tiny-gpt")
    shape = torch.Size((64, 64))
    same = initial_value(model, "blocks.0.mlp.up.weight", shape, 3, "cpu")
    assert torch.equal(same, initial_value(model, "blocks.0.mlp.up.weight", shape, 3, "cpu"))
    assert not torch.equal(same, initial_value(model, "blocks.1.mlp.up.weight", shape, 3, "cpu"))
    assert not torch.equal(same, initial_value(model, "blocks.0.mlp.up.weight", shape, 4, "cpu"))
    assert same.std().item() == pytest.approx(0.02, rel=0.05)
    down = initial_value(model, "blocks.0.mlp.down.weight", shape, 3, "cpu")
    assert down.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)


def test_flops_by_hand():
    """Llama-3 8B at 8,192: 57.914 GFLOP a token with attention counted full (torchtitan's convention)."""
    model = model_preset("llama3-8b")
    assert model_flops_per_token(model, 8192, causal=False) == pytest.approx(57.914e9, rel=1e-3)
    assert attention_flops_per_token(model, 8192, causal=True) == pytest.approx(
        attention_flops_per_token(model, 8192, causal=False) / 2, rel=1e-3
    )
