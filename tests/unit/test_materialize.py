"""Drawing initial weights holds one full parameter at a time."""

import weakref

import torch

from shardwise.model.decoder import Decoder
from shardwise.parallel import materialize as module
from shardwise.spec.presets import model_preset


def test_one_full_parameter_at_a_time(monkeypatch):
    model = model_preset("tiny-llama")
    drawn: list[weakref.ref] = []
    original = module.initial_value

    def counted(*arguments):
        assert not [ref for ref in drawn if ref() is not None]
        full = original(*arguments)
        drawn.append(weakref.ref(full))
        return full

    monkeypatch.setattr(module, "initial_value", counted)
    with torch.device("meta"):
        decoder = Decoder(model)
    module.materialize(decoder, model, 0, torch.device("cpu"))
    assert len(drawn) == len(list(decoder.parameters()))
    assert not any(parameter.is_meta for parameter in decoder.parameters())
