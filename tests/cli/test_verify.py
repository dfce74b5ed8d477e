"""`shardwise verify`: the same model or not, on real processes."""

import json
import signal
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file

from jobs import finish, start
from shardwise.cli.main import main
from shardwise.model.huggingface import NAMINGS, parameter_shapes, their_names, to_theirs
from shardwise.spec import load_run
from shardwise.spec.huggingface import model_config
from shardwise.training.parity import train_few_steps
from shardwise.verbs import verify as verify_module
from shardwise.verbs.checkpoint import import_checkpoint
from shardwise.verbs.scaled import scale_down

QUANTITIES = ["initial weights", "tokens", "loss", "gradient norm", "weights", "validation loss"]
# A rank whose trainer is wrong: what is patched stands in {fault}.
WORKER = """
import sys
from shardwise.launching import hold_stop_signals
hold_stop_signals()  # as run_worker does, before torch starts threads
from shardwise.parallel.module import ParallelModule
original = ParallelModule.gradient_norm
def patched(module):
    {fault}
    return original(module)
ParallelModule.gradient_norm = patched
from shardwise.verbs.verify_rank import main
sys.exit(main())
"""


@pytest.fixture
def verify(tmp_path, capsys):
    """verify(layout, *words, model=…) -> exit code, stdout, stderr."""

    def run(layout, *words, model="tiny-llama"):
        path = tmp_path / "run.yaml"
        recipe = {"sequence": 64, "batch_tokens": 2048}
        path.write_text(yaml.safe_dump({"model": model, "cluster": {"gpu": "cpu"}, "layout": layout, "recipe": recipe}))
        code = main(["verify", str(path), *map(str, words)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def plant(monkeypatch, fault):
    monkeypatch.setattr(verify_module, "WORKER", (sys.executable, "-c", WORKER.format(fault=fault)))


def test_a_dense_model(verify):
    code, out, err = verify({"dp_shard": 4, "recompute": "full"}, "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert list(answer) == ["layout", "scaled", "precision", "quantities", "same"]
    assert answer["same"] is True
    assert list(answer["quantities"]) == QUANTITIES
    for name, quantity in answer["quantities"].items():
        assert quantity["tolerance"] == (0 if name in ("initial weights", "tokens") else 1e-10)
        assert quantity["difference"] <= quantity["tolerance"]
        assert quantity["same"] is True
    assert answer["layout"]["dp_shard"] == 4
    assert answer["scaled"]["layout"]["dp_shard"] == 2
    assert answer["scaled"]["layout"]["recompute"] == "full"
    assert answer["precision"] == "fp64"


def test_a_model_with_experts(verify):
    code, out, err = verify({"dp_shard": 4, "ep": 4}, model="tiny-moe")
    assert code == 0, out + err
    lines = [line.split() for line in out.splitlines()]
    assert ["layout.ep", "4", "2"] in lines
    assert ["ep", "2", "of", "2"] in [line[:4] for line in lines]  # the table of the mesh
    assert out.count("  the same\n") == len(QUANTITIES)
    assert out.endswith("\nthe same model\n")


def test_a_fault_is_seen(verify, monkeypatch):
    plant(monkeypatch, "[p.grad.mul_(2) for p in module.parameters() if module.layout.world > 1]")
    code, out, _ = verify({"dp_replicate": 2}, "--json", "--precision", "fp32")
    assert code == 1
    answer = json.loads(out)
    assert answer["same"] is False
    same = {name: quantity["same"] for name, quantity in answer["quantities"].items()}
    assert same["initial weights"]
    assert same["tokens"]
    assert not same["gradient norm"]
    assert answer["quantities"]["gradient norm"]["tolerance"] == 1e-5


def test_a_copy_that_drifts_is_seen(verify, monkeypatch):
    plant(monkeypatch, "[p.grad.add_(1e-4) for p in module.parameters() if module.mesh.rank == 1]")
    code, out, _ = verify({"dp_replicate": 2})
    assert code == 1
    (weights,) = (line for line in out.splitlines() if line.startswith("weights"))
    assert weights.endswith("NOT the same")
    assert out.endswith("\nNOT the same model\n")


def test_a_rank_that_fails_ends_all(tmp_path, monkeypatch, capfd):
    plant(monkeypatch, "if module.mesh.rank == 1: raise RuntimeError('the disk is on fire')")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": "tiny-llama", "cluster": {"gpu": "cpu"}, "layout": {"tp": 2},
                                    "recipe": {"sequence": 64}}))  # fmt: skip
    assert main(["verify", str(path)]) == 3
    assert "rank 1 (tp 1) failed: RuntimeError: the disk is on fire" in capfd.readouterr().err


def test_a_stop_ends_all_at_once(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": "tiny-llama", "cluster": {"gpu": "cpu"}, "layout": {"tp": 2},
                                    "recipe": {"sequence": 64}}))  # fmt: skip
    process = start("verify", path)
    lines = []
    while not (lines and lines[-1].startswith("one process: ")):
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 3
    assert "stopped before a verdict" in output
    assert "Traceback" not in output
    assert "same model" not in output


LLAMA = {"preset": "tiny-llama", "layers": 2, "hidden": 32, "ffn": 48, "head_dim": 8}


def write_weights(directory, model):
    """Random weights under the names of transformers."""
    config = model_config(model)
    naming = NAMINGS[config["model_type"]]
    generator = torch.Generator().manual_seed(1)
    tensors = {
        their: tensor.contiguous()
        for name, shape in parameter_shapes(model).items()
        for their, tensor in zip(
            their_names(model, naming, name),
            to_theirs(model, naming, name, 0.1 * torch.randn(shape, generator=generator)),
            strict=True,
        )
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")


def test_a_model_of_hugging_face_and_one_of_a_run(verify, tmp_path):
    model = load_run({"model": LLAMA, "cluster": {"gpu": "cpu"}, "recipe": {}}).model
    write_weights(tmp_path / "theirs", model)
    code, out, err = verify({"pp": 2}, "--checkpoint", tmp_path / "theirs", "--json", model="llama3-8b")
    assert code == 0, err
    assert {**json.loads(out)["scaled"]["model"], "name": ""} == {**model.dump(), "name": ""}
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours", say=lambda _: None)
    code, out, err = verify({"dp_shard": 8, "tp": 2}, "--checkpoint", tmp_path / "ours", model="llama3-8b")
    assert code == 0, out + err
    assert "model.layers" not in out


def weights_of(name):
    return torch.full(SHAPES[name], 0.01)


SHAPES = parameter_shapes(load_run({"model": LLAMA, "cluster": {"gpu": "cpu"}, "recipe": {}}).model)


def wrong_weights(run):
    """The names, and which of them do not begin as they were given."""
    trained = train_few_steps(run, torch.device("cpu"), weights_of)
    given = {name: weights_of(name).double() for name in trained.initial}
    return trained.names, [name for name, t in trained.initial.items() if not torch.equal(t.full_tensor(), given[name])]


def test_given_weights_are_the_initial_ones(ranks):
    run = load_run({"model": LLAMA, "cluster": {"gpu": "cpu"}, "layout": {"dp_shard": 2}, "recipe": {"sequence": 64}})
    for names, wrong in ranks(2).run(wrong_weights, scale_down(run, 2, "fp64", run.model)):
        assert set(names) == SHAPES.keys()
        assert wrong == []


@pytest.mark.parametrize(
    ("layout", "words", "message"),
    [
        ({"tp": 3}, [], "layout.tp 3 does not divide model.heads 4"),
        ({"dp_shard": 2, "tp": 2, "cp": 2, "pp": 2}, [], "still has 16 ranks; nearest: --nproc 16"),
        ({"tp": 2}, ["--nproc", "0"], "--nproc 0"),
        ({"tp": 2}, ["--nproc", "1"], "nearest: --nproc 2"),
        ({"tp": 2}, ["--precision", "fp46"], "did you mean 'fp64'"),
        ({"tp": 2}, ["--checkpoint", "nowhere"], "--checkpoint: "),
        ({"tp": 2, "offload": "parameters"}, [], "nearest: zero: 3, or offload: optimizer"),
        ({"tp": 2}, ["--layout.schedul", "1f1b"], "did you mean 'schedule'"),
    ],
)
def test_bad_input(verify, layout, words, message):
    code, out, err = verify(layout, *words)
    assert code == 2
    assert message in err
    assert "steps on" not in out


def test_a_model_too_large_to_stay_as_it_is(verify, tmp_path):
    (tmp_path / "large").mkdir()
    config = model_config(load_run({"model": "llama3-405b", "cluster": {"gpu": "cpu"}, "recipe": {}}).model)
    (tmp_path / "large" / "config.json").write_text(json.dumps(config))
    code, _, err = verify({"tp": 2}, "--checkpoint", tmp_path / "large")
    assert code == 2
    assert "has 405.9G parameters, and comparing them on 2 ranks in fp64 may take" in err
