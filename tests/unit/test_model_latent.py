"""Multi-head latent attention, against its equations, and what it shares with the other attention."""

import math

import pytest
import torch
from torch.nn import functional as F

from shardwise.model.cache import Cache
from shardwise.model.decoder import Decoder
from shardwise.model.generate import generate
from shardwise.model.latent import LatentAttention
from shardwise.model.layers import rotate
from shardwise.model.rope import rotary_table
from shardwise.planner.parameters import count_parameters
from shardwise.spec import InputError, Model
from shardwise.spec.presets import model_preset

LATENT = {"query_rank": 10, "kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
EXPERTS = {"count": 8, "top_k": 2, "ffn": 16, "shared_ffn": 16, "dense_layers": 1, "router": "sigmoid",
           "router_bias": True, "groups": 4, "top_groups": 2}  # fmt: skip
YARN = {"kind": "yarn", "factor": 4, "original_sequence": 16, "attention_factor": 1, "mscale_all_dim": 0.8}


def model_of(**changes) -> Model:
    small = {"layers": 2, "hidden": 24, "heads": 3, "kv_heads": 3, "head_dim": 8, "ffn": 32, "tied": False}
    return Model.load(model_preset("tiny-llama").dump() | small | {"latent": LATENT} | changes)


def random_(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    module = module.double()
    for tensor in module.state_dict().values():
        tensor.normal_(std=0.4)
    return module


@pytest.mark.parametrize("changes", [{}, {"latent": {**LATENT, "query_rank": 0}}, {"rope_scaling": YARN}])
def test_equals_its_equations(changes):
    """arXiv 2405.04434, equations 9 to 19, head by head with an explicit softmax."""
    model = model_of(**changes)
    attention = random_(LatentAttention(model))
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    rope = rotary_table(model, torch.arange(7), 7, torch.float64)
    if model.latent.query_rank:
        compressed = F.rms_norm(x @ attention.q_a.weight.T, (10,), attention.q_norm.weight, 1e-6)
        queries = compressed @ attention.q_b.weight.T
    else:
        queries = x @ attention.q.weight.T
    latent, shared = (x @ attention.kv_a.weight.T).split([8, 4], dim=-1)
    latent = F.rms_norm(latent, (8,), attention.kv_norm.weight, 1e-6)
    outputs = []
    for head in range(3):
        q = queries[..., head * 10 : (head + 1) * 10]
        rows = attention.kv_b.weight[head * 11 : (head + 1) * 11]
        key, value = latent @ rows[:6].T, latent @ rows[6:].T
        turned_query, turned_key = (rotate(part[:, :, None], *rope)[:, :, 0] for part in (q[..., 6:], shared))
        scores = q[..., :6] @ key.transpose(1, 2) + turned_query @ turned_key.transpose(1, 2)
        scores = scores / math.sqrt(10) * (0.08 * math.log(4) + 1) ** (2 if model.rope_scaling else 0)
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
        outputs.append(scores.softmax(-1) @ value)
    expected = torch.cat(outputs, dim=-1) @ attention.out.weight.T
    torch.testing.assert_close(attention(x, rope), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"experts": EXPERTS}, {"latent": {**LATENT, "query_rank": 0}}])
def test_counts_cache_and_compilation(changes):
    model = model_of(**changes)
    decoder = random_(Decoder(model, torch.float64)).eval()
    assert count_parameters(model).total == sum(tensor.numel() for tensor in decoder.state_dict().values())
    ids = torch.randint(320, (2, 12))
    expected = decoder(ids)
    cache = Cache(model.layers, capacity=12)
    parts = [decoder(ids[:, :7], cache=cache), *(decoder(ids[:, at : at + 1], cache=cache) for at in range(7, 12))]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
    assert len(list(generate(decoder, ids[0], 5, temperature=0))) == 5
    for block in decoder.blocks.values():
        block.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(decoder(ids), expected)


def test_attend_is_given_the_scale():
    attention = random_(LatentAttention(model_of(rope_scaling=YARN)))
    seen = []

    def attend(q, k, v, scale=None):
        seen.append((q.shape, k.shape, v.shape, scale))
        return v

    attention.attend = attend
    attention(torch.randn(2, 7, 24, dtype=torch.float64), None)
    ((*shapes, scale),) = seen
    assert [tuple(shape) for shape in shapes] == [(2, 3, 7, 10), (2, 3, 7, 10), (2, 3, 7, 5)]
    assert scale == pytest.approx((0.08 * math.log(4) + 1) ** 2 / math.sqrt(10))


def test_hidden_need_not_be_a_multiple_of_heads():
    changes = model_preset("tiny-llama").dump() | {"hidden": 26, "heads": 3, "kv_heads": 3, "latent": LATENT}
    del changes["head_dim"]
    model = Model.load(changes)
    assert model.rotary_dim == 4
    ids = torch.randint(320, (1, 5))
    assert random_(Decoder(model, torch.float64))(ids).shape == (1, 5, 320)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": True}, "qk_norm does not go with latent attention"),
        ({"qkv_bias": True}, "qkv_bias does not go with latent attention"),
        ({"latent": {**LATENT, "rope_dim": 3}}, "latent.rope_dim 3 must be even for RoPE; nearest: 4"),
        ({"latent": None, "rope_scaling": YARN}, "rope_scaling.mscale_all_dim needs latent attention"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        model_of(**changes)
