"""Parameter counts of mixtures of experts, of which the trainer does not build all."""

import pytest

from shardwise.planner.parameters import count_parameters, layer_parameters, matmul_parameters
from shardwise.spec import InputError, Layout, load_run
from shardwise.spec.presets import model_names, model_preset, published_active, published_parameters
from shardwise.spec.trainable import require_trainable

MIXTURES = [name for name in model_names() if model_preset(name).experts]
PUBLISHED = [name for name in MIXTURES if published_parameters(name)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_equals_the_published_count(name):
    assert count_parameters(model_preset(name)).total == published_parameters(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_active_equals_the_published_figure_to_its_last_digit(name):
    count = count_parameters(model_preset(name))
    active = count.active - count.embedding if name.startswith("gpt-oss") else count.active
    assert active == pytest.approx(published_active(name), rel=0.02)


def test_rank_counts_by_hand():
    """Tensor parallelism divides everything; expert parallelism the routed experts only."""
    model = model_preset("mixtral-8x7b")
    attention, expert, router = 4096 * 128 * (64 + 16), 3 * 4096 * 14336, 4096 * 8
    assert layer_parameters(model, Layout.load({}), 0) == attention + 8 * expert + router
    assert layer_parameters(model, Layout.load({"tp": 2}), 0) == (attention + 8 * expert + router) / 2
    assert layer_parameters(model, Layout.load({"dp_shard": 8, "ep": 8}), 0) == attention + router + expert
    assert matmul_parameters(model) == 32 * (attention + 2 * expert + router) + 4096 * 32000


def test_some_are_planned_not_trained():
    run = {
        "model": "gpt-oss-20b",
        "cluster": {"gpu": "cpu"},
        "layout": {},
        "recipe": {"batch_tokens": 1024, "steps": 1},
    }
    with pytest.raises(InputError, match="model.attention_sinks cannot be trained by this version"):
        require_trainable(load_run(run), 1)
