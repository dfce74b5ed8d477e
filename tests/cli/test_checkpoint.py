"""`shardwise checkpoint` and `generate`: what a run has saved, and the way to transformers and back."""

import json
import re
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import shardwise as sw
from jobs import RUN, metrics, shardwise
from shardwise.checkpoints.restore import restore
from shardwise.checkpoints.stream import TensorReader
from shardwise.cli.main import main
from shardwise.model import weight_files
from shardwise.model.decoder import Decoder
from shardwise.model.weight_files import WeightFiles
from shardwise.spec import InputError, Run, load_run


@pytest.fixture
def run_main(capsys):
    def run_main(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run_main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on two FSDP ranks, and its data with a tokenizer.json. Not to be changed."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "text").mkdir()
    for number in range(20):
        (directory / "text" / f"{number}.txt").write_text("once upon a time there was a layout\n" * (number + 5))
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | {"<|endoftext|>": 256}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    data = directory / "data"
    sw.prepare_data(directory / "text", data, tokenizer=str(directory / "tokenizer.json"))
    run = {**RUN, "recipe": {**RUN["recipe"], "data": str(data), "steps": 2, "checkpoint": {"every": 1, "keep": 5}}}
    (directory / "run.yaml").write_text(yaml.safe_dump(run))
    code, output = shardwise("train", directory / "run.yaml", "--nproc", "2", "--out", directory / "run")
    assert code == 0, output
    return directory


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy of it that may be changed."""
    return shutil.copytree(trained / "run", tmp_path / "run")


def decoder_at(checkpoint) -> Decoder:
    run = Run.load(json.loads((checkpoint / "manifest.json").read_text())["run"])
    decoder = Decoder(run.model).eval()
    restore(checkpoint, {"model": decoder.state_dict()})
    return decoder


def weights_of(directory) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def test_transformers_opens_a_run_of_two_ranks(run_main, trained, tmp_path):
    out = tmp_path / "hf"
    code, text, _ = run_main("checkpoint", "export", trained / "run", "--to", "hf", "-o", out)
    assert code == 0
    assert "exported" in text
    assert {path.name for path in out.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    decoder = decoder_at(trained / "run" / "checkpoints" / "step-00000002")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    ids = torch.randint(320, (2, 32))
    with torch.no_grad():
        assert (model(ids).logits - decoder(ids)).abs().max() <= 1e-5
    assert model.config.eos_token_id == 256
    text = "once upon a time"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer(text)["input_ids"] == Tokenizer.from_file(str(trained / "tokenizer.json")).encode(text).ids


def test_step_dtype_and_size_of_files(run_main, trained, tmp_path):
    run_main("checkpoint", "export", trained / "run", "-o", tmp_path / "last")
    code, *_ = run_main(
        "checkpoint", "export", trained / "run", "-o", tmp_path / "hf", "--step", "1", "--dtype", "bf16",
        "--max-shard-size", "10K",
    )  # fmt: skip
    assert code == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    weights, last = weights_of(tmp_path / "hf"), weights_of(tmp_path / "last")
    assert weights.keys() == last.keys() == index["weight_map"].keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    first = decoder_at(trained / "run" / "checkpoints" / "step-00000001")
    assert torch.equal(weights["model.embed_tokens.weight"], first.embedding.weight.data.bfloat16())
    assert not torch.equal(last["model.embed_tokens.weight"], first.embedding.weight.data)


def test_export_import_export_is_bit_exact(run_main, trained, tmp_path):
    run_main("checkpoint", "export", trained / "run", "-o", tmp_path / "hf", "--max-shard-size", "10K")
    code, text, _ = run_main("checkpoint", "import", tmp_path / "hf", "--out", tmp_path / "imported")
    assert code == 0
    assert "step-00000000" in text
    assert run_main("checkpoint", "verify", tmp_path / "imported")[0] == 0
    run_main("checkpoint", "export", tmp_path / "imported", "-o", tmp_path / "again")
    before, after = weights_of(tmp_path / "hf"), weights_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    code, text, _ = run_main("generate", tmp_path / "imported", "--prompt", "once", "--tokens", "3")
    assert code == 0
    assert text.startswith("once")


@pytest.mark.parametrize(
    "words",
    [["--nproc", "1"], ["--nproc", "2", "--layout", "{dp_shard: 2, zero: 2}"],
     ["--nproc", "2", "--layout", "{dp_replicate: 2}", "--recipe.precision", "fp64"]],
)  # fmt: skip
def test_training_starts_from_imported_weights(trained, tmp_path, words):
    """On any layout and with another recipe: with next to no learning rate, step 1 leaves the weights as they were."""
    sw.export_checkpoint(trained / "run", tmp_path / "hf")
    sw.import_checkpoint(tmp_path / "hf", tmp_path / "run")
    code, output = shardwise(
        "train", trained / "run.yaml", "--out", tmp_path / "run", "--model", tmp_path / "hf", "--recipe.steps", "1",
        "--recipe.data", "builtin", "--recipe.seed", "7", "--recipe.optimizer.lr", "1e-9",
        "--recipe.checkpoint.keep", "1", *words,
    )  # fmt: skip
    assert code == 0, output
    assert "starting from the weights in" in output
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    assert [one.step for one in sw.list_checkpoints(tmp_path / "run")] == [1]
    sw.export_checkpoint(tmp_path / "run", tmp_path / "after")
    before, after = weights_of(tmp_path / "hf"), weights_of(tmp_path / "after")
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-7)


def test_only_the_same_model_starts_from_imported_weights(run_main, trained, tmp_path):
    sw.export_checkpoint(trained / "run", tmp_path / "hf")
    sw.import_checkpoint(tmp_path / "hf", tmp_path / "run")
    words = ("train", trained / "run.yaml", "--out", tmp_path / "run", "--model.layers", "2")
    code, _, err = run_main(*words)
    assert code == 2
    assert "imported weights of another model:\n  model.layers is 1 there and 2 here" in err


class Alive:
    """Counts the tensors that a loader has given out and that are still there when the next one is asked for."""

    def __init__(self, monkeypatch, owner):
        self.most, self.loads, self._given = 0, 0, weakref.WeakSet()
        load = owner.load

        def counting(reader, name):
            self.loads += 1
            self.most = max(self.most, len(self._given))
            tensor = load(reader, name)
            self._given.add(tensor)
            return tensor

        monkeypatch.setattr(owner, "load", counting)


def test_a_model_is_never_whole_in_memory(monkeypatch, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=9, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    reading = Alive(monkeypatch, WeightFiles)
    sw.import_checkpoint(tmp_path / "hf", tmp_path / "run")
    assert reading.loads == 9 * 9 + 3
    assert reading.most <= 4  # queries, keys and values of one block, and the one before
    exporting = Alive(monkeypatch, TensorReader)
    sw.export_checkpoint(tmp_path / "run", tmp_path / "back")
    assert exporting.loads == 9 * 7 + 3
    assert exporting.most <= 1


def test_list_and_verify(run_main, run_dir):
    code, text, _ = run_main("checkpoint", "list", run_dir)
    assert code == 0
    assert [line.split(":")[0] for line in text.splitlines()] == ["step 2", "step 1"]
    assert re.fullmatch(r"step 2: 512 tokens, 2 ranks, 0.0\d+ GiB: complete", text.splitlines()[0])
    assert run_main("checkpoint", "verify", run_dir)[:2] == (0, text.replace("complete", "verified"))

    shard = next((run_dir / "checkpoints" / "step-00000002").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[-9] ^= 1
    shard.write_bytes(content)
    assert run_main("checkpoint", "list", run_dir)[:2] == (0, text)
    code, out, _ = run_main("checkpoint", "verify", run_dir, "--json")
    two, one = json.loads(out)["checkpoints"]
    assert code == 1
    assert (two["step"], two["tokens"], two["world"]) == (2, 512, 2)
    assert f"{shard.name} is damaged" in two["reason"]
    assert one["reason"] is None
    assert run_main("checkpoint", "verify", run_dir, "--step", "1")[0] == 0
    code, _, err = run_main("checkpoint", "verify", run_dir, "--step", "5")
    assert code == 2
    assert "holds no checkpoint of step 5" in err


@pytest.mark.parametrize("words", [["list"], ["verify", "--json"]])
def test_what_is_there_is_seen_without_torch(trained, words):
    code = (
        "import sys; from shardwise.cli.main import main\n"
        f"code = main(['checkpoint', *{words!r}, {str(trained / 'run')!r}]); sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_damaged_checkpoints_are_passed_over_or_named(run_main, run_dir, tmp_path):
    for step in (2, 1):
        (run_dir / "checkpoints" / f"step-0000000{step}" / ".metadata").write_bytes(b"nothing")
        newest = run_main("checkpoint", "export", run_dir, "-o", tmp_path / f"hf{step}")
        named = run_main("checkpoint", "export", run_dir, "-o", tmp_path / "hf", "--step", step)
        assert named[0] == 2
        assert ".metadata has 7 bytes instead of" in named[2]
        assert newest[0] == (0 if step == 2 else 2)
    assert "holds no complete checkpoint" in newest[2]
    assert "step-00000002 is skipped" in newest[2]
    code, _, err = run_main("generate", run_dir)
    assert code == 2
    assert "holds no complete checkpoint" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf2", "run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "gguf"], "--to: unknown format 'gguf'. Known: hf"),
        (["--dtype", "fp16"], "--dtype: unknown dtype 'fp16'; did you mean"),
        (["--max-shard-size", "many"], "--max-shard-size many: a number is expected"),
        (["--max-shard-size", "0"], "at least 1 byte"),
        (["--step", "7"], "holds no checkpoint of step 7; what is there: 1, 2"),
        (["-o", "full"], "full: is there already"),
        (["-o", "file/hf"], "cannot be written"),
    ],
)
def test_exports_that_are_refused(run_main, trained, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "file").touch()
    code, _, err = run_main("checkpoint", "export", trained / "run", "-o", "hf", *words)
    assert code == 2
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_a_run_that_is_not_there(run_main, run_dir):
    for words in (["checkpoint", "list"], ["checkpoint", "verify"], ["generate"], ["checkpoint", "export", "-o", "x"]):
        code, _, err = run_main(*words, run_dir.with_name("rum"))
        assert code == 2
        assert f"no such directory; did you mean {run_dir}?" in err


def test_models_that_transformers_does_not_have(run_main, run_dir, tmp_path):
    run = load_run(run_dir / "run.yaml", [("model.norm", "layernorm")])
    path = tmp_path / "odd.yaml"
    path.write_text(run.to_yaml())
    code, output = shardwise("train", path, "--out", tmp_path / "odd", "--recipe.steps", "1")
    assert code == 0, output
    code, _, err = run_main("checkpoint", "export", tmp_path / "odd", "-o", tmp_path / "hf")
    assert code == 2
    assert 'nearest: llama, but norm is "layernorm"' in err
    assert not (tmp_path / "hf").exists()


def full(*arguments, **options):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_nothing_behind(run_main, monkeypatch, run_dir, tmp_path):
    sw.export_checkpoint(run_dir, tmp_path / "hf")
    there = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(weight_files.os, "fsync", full)
    code, _, err = run_main("checkpoint", "export", run_dir, "-o", tmp_path / "out")
    assert code == 2
    assert "out: cannot be written: No space left on device" in err
    code, _, err = run_main("checkpoint", "import", tmp_path / "hf", "-o", tmp_path / "out")
    assert code == 2
    assert "step-00000000: cannot be written: No space left on device" in err
    left = [path for path in sorted(tmp_path.rglob("*")) if path not in there]
    assert left == [tmp_path / "out", tmp_path / "out" / "checkpoints"]
    assert not list((tmp_path / "out" / "checkpoints").iterdir())


def test_imports_that_are_refused(run_main, run_dir, tmp_path):
    sw.export_checkpoint(run_dir, tmp_path / "hf")
    code, _, err = run_main("checkpoint", "import", tmp_path / "hf", "-o", run_dir)
    assert code == 2
    assert "holds checkpoints already" in err
    code, _, err = run_main("checkpoint", "import", tmp_path / "hg", "-o", tmp_path / "new")
    assert code == 2
    assert "no such directory" in err
    weights = tmp_path / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, _, err = run_main("checkpoint", "import", tmp_path / "hf", "-o", tmp_path / "new")
    assert code == 2
    assert "model.safetensors: is damaged" in err
    assert not (tmp_path / "new").exists()


def test_what_generate_says_without_a_tokenizer(run_main, trained, run_dir, tmp_path):
    sw.export_checkpoint(run_dir, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    sw.import_checkpoint(tmp_path / "hf", tmp_path / "imported")
    code, _, err = run_main("generate", tmp_path / "imported")
    assert code == 2
    assert "tokenizer is unknown: the weights were imported without a tokenizer.json" in err

    data = trained / "data"
    data.rename(trained / "gone")
    try:
        code, _, err = run_main("generate", run_dir)
        exported = run_main("checkpoint", "export", run_dir, "-o", tmp_path / "bare")
    finally:
        (trained / "gone").rename(data)
    assert code == 2
    assert f"its tokenizer is unknown, because it stands with the data: recipe.data: no directory '{data}'" in err
    assert exported[0] == 0
    assert "exported without a tokenizer" in exported[1]
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["eos_token_id"] is None


def test_prompts(run_main, trained, tmp_path):
    (tmp_path / "prompt").write_text("once upon")
    words = ("generate", trained / "run", "--tokens", "4", "--temperature", "0")
    given = run_main(*words, "--prompt", "once upon")
    assert run_main(*words, "--prompt-file", tmp_path / "prompt") == given
    assert given[0] == 0
    assert given[1].startswith("once upon")
    code, _, err = run_main(*words, "--prompt", "x", "--prompt-file", "-")
    assert code == 2
    assert "both given" in err
    code, _, err = run_main(*words, "--prompt-file", tmp_path / "pro")
    assert code == 2
    assert "cannot be read" in err


def test_python_raises_what_the_command_prints(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        sw.list_checkpoints(tmp_path / "none")
