"""`shardwise data prepare` as a user meets it, and training on what it reads."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from jobs import RUN, metrics, shardwise
from shardwise.cli.data import _line
from shardwise.cli.main import main
from shardwise.data import Progress


def run_main(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text(f"{number} times the same words\n" * 40)
    lines = [json.dumps({"body": {"text": f"line {number}\n" * 30}}) for number in range(20)]
    with gzip.open(source / "lines.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    return source


def prepare(capsys, source, out, *words):
    return run_main(capsys, "data", "prepare", source, "-o", out, "--text-field", "body.text", *words)


def test_the_table(capsys, tmp_path, texts):
    code, out, _ = prepare(capsys, texts, tmp_path / "data", "--validation-fraction", "0.2", "--workers", "1")
    assert code == 0
    header, train, validation = (line.split() for line in out.splitlines()[-3:])
    assert header == ["split", "files", "documents", "tokens", "bytes", "sha256"]
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    for row, name in ((train, "train"), (validation, "validation")):
        split = index[name]
        tokens, size = (sum(file[key] for file in split["files"]) for key in ("tokens", "bytes"))
        assert row[:5] == [name, "1", str(split["documents"]), f"{tokens:,}", f"{size:,}"]
        assert re.fullmatch("[0-9a-f]{12}", row[5])
    again, out, _ = prepare(capsys, texts, tmp_path / "data", "--validation-fraction", "0.2")
    assert again == 0 and "is intact and is reused" in out


def test_json_is_all_there_is_on_stdout(capsys, tmp_path, texts):
    code, out, err = prepare(capsys, texts, tmp_path / "data", "--json")
    assert code == 0
    document = json.loads(out)
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    assert document == {"out": str(tmp_path / "data"), "fingerprint": document["fingerprint"], **index}
    assert "found 40 documents" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text-field", "txt"], "has no field 'txt'. It has: body"),
        (["--tokenizer", "gtp2"], "did you mean 'gpt2'"),
        (["--validation-fraction", "1"], "validation_fraction: at least 0 and below 1"),
    ],
)
def test_mistakes(capsys, tmp_path, texts, words, message):
    code, _, err = prepare(capsys, texts, tmp_path / "data", *words)
    assert code == 2
    assert message in err
    assert not (tmp_path / "data").exists()


def test_bad_lines_are_errors_or_counted(capsys, tmp_path, texts):
    (texts / "more.jsonl").write_text('{"body": {"text": "good"}}\nbad\n')
    code, _, err = prepare(capsys, texts, tmp_path / "data")
    assert code == 2
    assert "more.jsonl:2: the line is not JSON" in err
    code, out, _ = prepare(capsys, texts, tmp_path / "data", "--skip-bad")
    assert code == 0
    assert "left out: 1 bad: " in out and "more.jsonl:2" in out


@pytest.mark.parametrize("words", [["0"], ["-1"]])
def test_a_wrong_number_of_workers(capsys, tmp_path, texts, words):
    code, _, _ = prepare(capsys, texts, tmp_path / "data", "--workers", *words)
    assert code == 2


def test_progress_in_words():
    reading = Progress("reading", "B", 1_200_000_000, 4_800_000_000, 200_000_000, 310_000, 40.0)
    assert _line(reading) == "reading 1.2GB of 4.8GB  310,000 documents  25MB/s  0:02:24 left"
    writing = Progress("writing", "tokens", 0, 5_000_000, 0, 0, 0.0)
    assert _line(writing) == "writing 0 tokens of 5M tokens"


def write_bins(directory: Path) -> Path:
    directory.mkdir()
    ids = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2")
    for name, part in (("x_val_0.bin", ids[:600]), ("x_train_1.bin", ids[600:3000]), ("x_train_2.bin", ids[3000:])):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(part)
        (directory / name).write_bytes(header.tobytes() + part.tobytes())
    return directory


def write_run(directory: Path, data: object, vocabulary: int) -> Path:
    recipe = {**RUN["recipe"], "steps": 3, "data": data}
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, "model": {**RUN["model"], "vocabulary": vocabulary}, "recipe": recipe}))
    return path


def evaluations(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]


def test_training_on_bin_files(tmp_path):
    """The same on one rank and on two; bits per byte stay unknown where GPT-2's tokenizer is not there."""
    run = write_run(tmp_path, str(write_bins(tmp_path / "bins")), 50304)
    for ranks in ("1", "2"):
        words = ("train", run, "--nproc", ranks, "--out", tmp_path / ranks)
        code, output = shardwise(*words, TIKTOKEN_CACHE_DIR=str(tmp_path / "none"))
        assert code == 0, output
        assert "unknown bits per byte" in output
    one, two = (evaluations(tmp_path / ranks)[-1] for ranks in ("1", "2"))
    assert one["bits_per_byte"] is None and one["tokens"] == 512
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)


def test_training_on_a_mixture(capsys, tmp_path, texts):
    """Each source's loss is reported; the overall one is weighted by tokens; two ranks agree with one, and continue."""
    prepare(capsys, texts, tmp_path / "a", "--validation-fraction", "0.3")
    mixture = [{"path": str(tmp_path / "a"), "weight": 3}, "builtin"]
    run = write_run(tmp_path, mixture, 320)
    for ranks in ("1", "2"):
        code, output = shardwise("train", run, "--nproc", ranks, "--out", tmp_path / ranks)
        assert code == 0, output
    one, two = (evaluations(tmp_path / ranks)[-1] for ranks in ("1", "2"))
    first, second = one[f"loss/{tmp_path / 'a'}"], one["loss/builtin"]
    assert one["loss"] == pytest.approx(0.75 * first + 0.25 * second)
    assert one == pytest.approx(two, rel=1e-5)
    assert one["bits_per_byte"] == pytest.approx(one["loss"] / np.log(2), rel=0.05)  # nearly every token is a byte
    code, output = shardwise("train", run, "--nproc", "1", "--out", tmp_path / "2", "--recipe.steps", "5")
    assert code == 0, output
    assert [line["step"] for line in metrics(tmp_path / "2")] == [1, 2, 3, 4, 5]
    mixture[0]["weight"] = 2
    code, output = shardwise("train", write_run(tmp_path, mixture, 320), "--nproc", "1", "--out", tmp_path / "2")
    assert code == 2
    assert "recipe.data" in output


def test_mistakes_in_a_mixture(capsys, tmp_path):
    for data, message in [
        ([{"path": "builtin", "wieght": 1}], "recipe.data.0: unknown field 'wieght'; did you mean 'weight'?"),
        ([{"path": "builtin", "weight": 0}], "recipe.data.0.weight: Input should be greater than 0"),
        (["builtin", "absent"], "recipe.data.1.path: no directory 'absent'"),
        (["builtin", "builtin"], "recipe.data: 'builtin' stands twice"),
        ([], "recipe.data: `builtin`, a directory, or a list of {path: DIRECTORY, weight: NUMBER} is expected"),
        (["builtin", str(write_bins(tmp_path / "bins"))], "recipe.data.1: the tokens of"),
    ]:
        code, _, err = run_main(capsys, "train", write_run(tmp_path, data, 50304), "--out", tmp_path / "out")
        assert code == 2
        assert message in err
