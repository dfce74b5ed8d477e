"""Rotary frequencies of every kind, bit for bit those of transformers."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardwise.model.rope import rotary_frequencies, rotary_table
from shardwise.spec import InputError, Model

SIZE, SEQUENCE = 16, 512
FACTORS = [1 + 0.25 * index for index in range(SIZE // 2)]
YARN = {"kind": "yarn", "factor": 4, "original_sequence": 128}
LONG = {
    "kind": "longrope",
    "factor": 4,
    "original_sequence": 128,
    "short_factors": FACTORS,
    "long_factors": FACTORS[::-1],
}
KINDS = {  # ours, and what transformers calls the same
    "linear": ({"kind": "linear", "factor": 3}, {"rope_type": "linear", "factor": 3.0}),
    "dynamic": ({"kind": "dynamic", "factor": 2}, {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    "yarn, all set": (
        YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0,
         "beta_slow": 2.0, "truncate": False, "attention_factor": 1.5},
    ),
    "longrope": (
        LONG,
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128, "short_factor": FACTORS,
         "long_factor": FACTORS[::-1]},
    ),
    "llama3": (
        {"kind": "llama3", "factor": 8, "original_sequence": 128},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0},
    ),
}  # fmt: skip


def model(scaling: dict | None, **changes) -> Model:
    dimensions = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 8, "vocabulary": 8, "max_sequence": SEQUENCE}
    return Model.load(dimensions | {"rope_scaling": scaling, "rope_theta": 500_000} | changes)


@pytest.mark.parametrize("length", [100, 200, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind, length):
    ours, theirs = KINDS[kind]
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=SEQUENCE,
        rope_parameters={"rope_theta": 500_000, **theirs},
    )  # fmt: skip
    expected, magnitude = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"), seq_len=length)
    frequencies = rotary_frequencies(model(ours), length, torch.float32, torch.device("cpu"))
    assert torch.equal(frequencies, expected)
    cos, sin = rotary_table(model(ours), torch.arange(length), length, torch.bfloat16)
    angles = torch.arange(length).float()[:, None] * expected
    assert torch.equal(cos, angles.cos() * magnitude)
    assert torch.equal(sin, angles.sin() * magnitude)


def test_what_depends_on_the_length_of_the_sequence():
    device = torch.device("cpu")

    def same(scaling: dict, one: int, other: int) -> bool:
        first, second = (rotary_frequencies(model(scaling), n, torch.float64, device) for n in (one, other))
        return torch.equal(first, second)

    assert same(LONG, 1, 128)
    assert not same(LONG, 128, 129)
    assert same(LONG, 129, 500)
    assert same({"kind": "dynamic", "factor": 2}, 1, SEQUENCE)
    assert not same({"kind": "dynamic", "factor": 2}, SEQUENCE, SEQUENCE + 1)
    assert same(YARN, 1, 1000)


def test_fp64_tables_stay_fp64():
    cos, _ = rotary_table(model(YARN), torch.arange(4), 4, torch.float64)
    assert cos.dtype == torch.float64
    assert cos[0, 0].item() == pytest.approx(0.1 * math.log(4) + 1, abs=1e-15)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"kind": "yarm", "factor": 2}, "did you mean 'yarn'"),
        ({"factor": 2}, "unknown kind ''.*Known: dynamic, linear, llama3, longrope, yarn"),
        ({"kind": "linear"}, r"rope_scaling.linear.factor: is required"),
        ({"kind": "linear", "factor": 2, "beta_fast": 3}, "unknown field 'beta_fast'"),
        ({"kind": "yarn", "factor": 2}, r"original_sequence: is required"),
        ({"kind": "llama3", "factor": 2, "low_frequency_factor": 4}, "must be larger than low_frequency_factor"),
        (LONG | {"long_factors": [1, 2]}, "long_factors has 2 numbers.* 8"),
    ],
)
def test_scalings_that_cannot_be(scaling, message):
    with pytest.raises(InputError, match=message):
        model(scaling)


def test_a_scaling_needs_rope():
    with pytest.raises(InputError, match="needs positions: rope"):
        model(YARN, positions="learned")
