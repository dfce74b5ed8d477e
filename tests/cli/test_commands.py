"""The command line as a user meets it: help, mistakes, README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jobs import metrics, shardwise, write_run
from shardwise.cli.main import main
from shardwise.cli.overrides import split_overrides
from shardwise.spec import InputError, load_run
from shardwise.spec.trainable import require_trainable
from shardwise.verbs.resolve import resolve_layout

ROOT = Path(__file__).resolve().parent.parent.parent


def run_main(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_overrides_are_parted_from_the_verbs_own_words():
    words = ["train", "--recipe.steps", "4", "run.yaml", "--layout.tp=2", "--out", "x", "--model", "tiny-gpt"]
    assert split_overrides(words) == (
        ["train", "run.yaml", "--out", "x"],
        [("recipe.steps", "4"), ("layout.tp", "2"), ("model", "tiny-gpt")],
    )
    with pytest.raises(InputError, match="a value is expected"):
        split_overrides(["train", "--recipe.steps"])


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["data", "prepare", "--help"], ["--version"]])
def test_help_needs_no_torch(words):
    code = (
        f"import sys; from shardwise.cli.main import main; c = main({words!r}); sys.exit(c or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_importing_the_package_imports_no_torch():
    code = "import sys, shardwise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "tiny-lama"], "did you mean 'tiny-llama'"),
        (["--recipe.optimiser.lr", "1"], "did you mean 'optimizer'"),
        (["--recipe.batch_tokens", "257"], "nearest: 256"),
        (["--nproc", "3"], "do not divide over 3 ranks; nearest: 2 ranks"),
        (["--nproc", "0"], "--nproc 0"),
        (["--layout", "{tp: 3}"], "layout.tp 3 does not divide model.heads"),
        (["--recipe.data", "buildin"], "did you mean 'builtin'"),
        (["--model.vocabulary", "100"], "model.vocabulary is 100; it must be at least 257"),
        (["--log", "tensorbord"], "did you mean 'tensorboard'"),
        (["--cluster.gpus", "16", "--recipe.batch_tokens", "8K"], "more than the 8 of one node"),
    ],
)
def test_mistakes_are_found_before_a_rank_starts(capsys, tmp_path, words, message):
    code, _, err = run_main(capsys, "train", write_run(tmp_path), "--out", tmp_path / "out", *words)
    assert code == 2
    assert message in err
    assert not (tmp_path / "out" / "run.yaml").exists()


def test_run_fields_are_refused_where_no_run_is(capsys, tmp_path):
    code, _, err = run_main(capsys, "generate", tmp_path, "--recipe.steps", "3")
    assert code == 2
    assert "--recipe.steps is a field of a Run, and generate takes none" in err


def test_no_such_run_file(capsys, tmp_path):
    write_run(tmp_path)
    code, _, err = run_main(capsys, "train", tmp_path / "rum.yaml")
    assert code == 2
    assert "did you mean" in err


def test_an_output_that_cannot_be_written(capsys, tmp_path):
    run = write_run(tmp_path)
    code, _, err = run_main(capsys, "train", run, "--out", run / "below-a-file")
    assert code == 2
    assert "cannot be written" in err


def test_a_corrupt_shard_is_named(capsys, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(9):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} times the same words\n" * 40)
    code, out, _ = run_main(capsys, "data", "prepare", tmp_path / "text", "-o", tmp_path / "data")
    assert code == 0, out
    shard = next((tmp_path / "data").glob("train-*.npy"))
    content = bytearray(shard.read_bytes())
    content[-7] ^= 1
    shard.write_bytes(content)
    words = ("--recipe.data", tmp_path / "data", "--out", tmp_path / "out")
    code, _, err = run_main(capsys, "train", write_run(tmp_path), *words)
    assert code == 2
    assert shard.name in err
    shard.write_bytes(b"")
    code, _, err = run_main(capsys, "train", write_run(tmp_path), *words)
    assert code == 2
    assert shard.name in err


def test_generate_without_a_checkpoint(capsys, tmp_path):
    code, _, err = run_main(capsys, "generate", tmp_path)
    assert code == 2
    assert "holds no complete checkpoint" in err


def test_only_a_longer_run_or_another_layout_continues(capsys, tmp_path):
    run, out = write_run(tmp_path, steps=2), tmp_path / "out"
    code, output = shardwise("train", run, "--nproc", "1", "--out", out)
    assert code == 0, output
    for words, message in [
        (["--recipe.optimizer.lr", "1"], "recipe.optimizer.lr was 0.001 and is now 1.0"),
        (["--model.layers", "2"], "model.layers was 1 and is now 2"),
        (["--recipe.steps", "1"], "it had 2 steps and now has 1"),
    ]:
        code, _, err = run_main(capsys, "train", run, "--out", out, *words)
        assert code == 2
        assert message in err
    code, output = shardwise("train", run, "--nproc", "2", "--out", out, "--recipe.steps", "3")
    assert code == 0, output
    assert "continuing after step 2" in output
    assert [line["step"] for line in metrics(out)] == [1, 2, 3]


def readme_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_run_file_is_legal():
    (text,) = readme_blocks("yaml")
    run = resolve_layout(load_run(yaml.safe_load(text)), 8)
    require_trainable(run, 8)


def test_readme_commands_run(tmp_path):
    """Every `shardwise` command of README, in its order, in a directory that has what README supposes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    texts = tmp_path / "my-texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text("once upon a time there was a layout that fitted\n" * (number + 5))
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | {"<|endoftext|>": 256}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_run(tmp_path, data="my-data", steps=2)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    commands = [
        line[2:].split("#")[0].strip().removeprefix(".venv/bin/")
        for block in readme_blocks("console")
        for line in block.splitlines()
        if line.startswith("$ ") and "shardwise" in line
    ]
    assert len(commands) >= 6
    for command in commands:
        result = subprocess.run(
            f"{sys.executable} -m {command}", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
