"""The nouns refuse what cannot be, and say what would."""

import pytest

from shardwise.spec import InputError, Layout, Model, Run, load_run, read_yaml
from shardwise.spec.numbers import human, parse_count, parse_number
from shardwise.spec.presets import gpu_called, gpu_names, gpu_preset, model_preset

RUN = {
    "model": "tiny-llama",
    "cluster": {"gpu": "cpu", "gpus": 2},
    "recipe": {"sequence": 256, "batch_tokens": "16384", "steps": 40},
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16M", 16_000_000),
        ("1.5G", 1_500_000_000),
        ("4096", 4096),
        (2.0, 2),
        ("1e3", 1000),
        ("2k", 2000),
        ("1_000", 1000),
    ],
)
def test_counts(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["many", "", "1.5", True, None, "inf", "nan", [1]])
def test_not_counts(text):
    with pytest.raises(ValueError):
        parse_count(text)


def test_numbers_that_yaml_reads_as_text():
    assert parse_number("6e-4") == 6e-4
    assert human(124_439_808) == "124.4M"


def test_run_survives_yaml():
    run = load_run(RUN, [("layout.dp_shard", "2"), ("recipe.optimizer.clip", "0")])
    assert load_run(run.dump()) == run
    assert "gpu: cpu" in run.to_yaml()


def test_command_line_beats_file_beats_defaults():
    run = load_run(RUN, [("recipe.steps", "50"), ("model.layers", "2"), ("layout.zero", "2"), ("layout.dp_shard", "2")])
    assert run.recipe.total_steps == 50
    assert run.model == model_preset("tiny-llama").model_copy(update={"layers": 2})
    assert (run.layout.zero, run.layout.dp_shard, run.layout.micro_batch) == (2, 2, 1)
    assert run.recipe.seed == 0


def test_tokens_round_up_to_whole_steps():
    recipe = load_run(RUN, [("recipe.steps", "null"), ("recipe.tokens", "16385")]).recipe
    assert recipe.total_steps == 2


def test_zero_follows_from_sharding():
    assert Layout.load({"dp_shard": 2}).zero == 3
    assert Layout.load({"dp_replicate": 2}).zero == 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("recipe.optimiser.lr", "1", "did you mean 'optimizer'"),
        ("recip.steps", "1", "did you mean 'recipe'"),
        ("layout.zero", "7", "layout.zero: unknown value '7'"),
        ("layout", "outo", "neither 'auto' nor a mapping"),
        ("layout.schedule", "1f1bb", "did you mean '1f1b'"),
        ("layout.recompute", "every:0", "every:K"),
        ("model", "tiny-lama", "did you mean 'tiny-llama'"),
        ("model.kv_heads", "3", "nearest: 2"),
        ("model.head_dim", "7", "nearest: 8"),
        ("cluster.gpu", "h100", "did you mean 'h100-sxm'"),
        ("cluster.gpus", "12", "nearest: 16"),
        ("recipe.steps", "1.5", "whole number is expected; nearest: 2"),
        ("recipe.steps", "0", "greater than or equal to 1"),
        ("recipe.batch_tokens", "1000", "nearest: 1024"),
        ("recipe.tokens", "1M", "steps or tokens, not both"),
        ("recipe.precision", "bf61", "did you mean 'bf16'"),
        ("recipe.optimizer.lr", "-1", "greater than 0"),
        ("recipe.optimizer.lr", "nan", "finite"),
    ],
)
def test_bad_values_are_named_with_what_would_work(path, value, message):
    with pytest.raises(InputError, match=message):
        load_run(RUN, [(path, value)])


def test_missing_parts_are_named():
    with pytest.raises(InputError, match="cluster: is required"):
        load_run({"model": "tiny-gpt", "recipe": {}})
    with pytest.raises(InputError, match="model.ffn: is required"):
        Model.load({"layers": 1, "hidden": 8, "heads": 2, "vocabulary": 5, "max_sequence": 4}, "model")


def test_a_file_with_a_key_twice_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: tiny-gpt\nmodel: tiny-llama\n")
    with pytest.raises(InputError, match=r"line 2: .*'model' stands twice"):
        read_yaml(path)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "tiny.yaml").write_text("model: [")
    with pytest.raises(InputError, match=r"tiny.yaml, line 2: not valid YAML"):
        read_yaml(tmp_path / "tiny.yaml")
    with pytest.raises(InputError, match=r"did you mean .*tiny.yaml"):
        read_yaml(tmp_path / "tny.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_yaml(tmp_path / "binary.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(InputError, match="a Run is a mapping"):
        load_run(tmp_path / "list.yaml")


def test_every_figure_has_a_source():
    for name in gpu_names():
        gpu = gpu_preset(name)
        for figure in [*gpu.peak_tflops.values(), gpu.memory_gb, gpu.bandwidth_tb_s]:
            assert figure is None or (figure.source and figure.date and figure.class_)


def test_unknown_chips_have_no_peak():
    assert gpu_called("NVIDIA H200").peak_flops("bf16") == pytest.approx(989.4e12)
    assert gpu_called("NVIDIA H200").peak_flops("fp64") is None
    assert gpu_called("Something else") is None


def test_nouns_are_frozen():
    run = Run.load(RUN)
    with pytest.raises(ValueError, match="frozen"):
        run.recipe.steps = 3


def test_a_chip_may_be_written_out():
    gpu = {
        "name": "mine",
        "node": 4,
        "peak_tflops": {"bf16": 100},
        "class": "measured",
        "source": "me",
        "date": "2026-11-29",
    }
    cluster = load_run({**RUN, "cluster": {"gpu": gpu, "gpus": 8}}).cluster
    assert cluster.gpus_per_node == 4
    assert cluster.gpu.peak_flops("bf16") == 100e12
    assert load_run({**RUN, "cluster": cluster.dump()}).cluster == cluster
