"""`shardwise plan` as a user meets it."""

import json
import subprocess
import sys

import pytest

from shardwise.cli.main import main
from shardwise.spec import load_run
from shardwise.verbs.sweep import parse_sizes

SMALL = ("plan", "gpt2-124m", "--gpu", "h100-sxm", "--gpus", "8", "--seq", "1024")


def run_main(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_table(capsys):
    code, out, _ = run_main(capsys, *SMALL, "--tokens", "10G", "--batch-tokens", "524288")
    assert code == 0
    assert "gpt2-124m on 8 × h100-sxm, sequence 1024, 524.3K tokens a step" in out
    assert "layouts searched in" in out
    assert "USD per GPU-hour" in out
    assert "modelled, not measured" in out


def test_json_is_one_document_in_the_promised_form(capsys):
    code, out, _ = run_main(capsys, *SMALL, "--tokens", "10G", "--batch-tokens", "524288", "--top", "3", "--json")
    assert code == 0
    answer = json.loads(out)
    assert len(answer["candidates"]) == 3
    first = answer["candidates"][0]
    assert first["verdict"] in ("fits", "tight", "oom")
    assert {"rank", "live_gib", "reserved_gib", "parts_gib"} <= first["memory"].keys()
    assert len(first["memory"]["reserved_gib"]) == 3
    assert {
        "step_seconds", "tokens_per_second_per_gpu", "mfu", "hfu", "bubble_fraction", "exposed_seconds"
    } <= first["time"].keys()  # fmt: skip
    assert first["cost"]["usd"] == pytest.approx(first["cost"]["gpu_hours"] * first["cost"]["price_usd_per_gpu_hour"])
    assert first["cost"]["gpu_hours"] == pytest.approx(8 * first["cost"]["hours"])
    assert answer["searched"] > 100
    assert all(isinstance(count, int) for count in answer["rejected"].values())


def test_the_run_file_it_writes_is_a_run(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    code, _, _ = run_main(capsys, *SMALL, "--tokens", "10G", "--batch-tokens", "524288", "-o", path)
    assert code == 0
    run = load_run(path)
    assert run.layout.world == 8
    assert run.recipe.tokens == 10_000_000_000


def test_no_fit_is_exit_code_1(capsys):
    code, out, _ = run_main(capsys, "plan", "llama3-405b", "--gpu", "h100-sxm", "--gpus", "8", "--seq", "8192")
    assert code == 1
    assert "oom" in out


def test_cluster_sizes_and_limits(capsys):
    words = ("plan", "llama3.2-1b", "--gpu", "h100-sxm", "--gpus", "8..32", "--seq", "4096", "--tokens", "100G",
             "--batch-tokens", "1048576", "--json")  # fmt: skip
    code, out, _ = run_main(capsys, *words)
    assert code == 0
    sizes = json.loads(out)["sizes"]
    assert [size["gpus"] for size in sizes] == [8, 16, 32]
    assert sizes[0]["scaling_efficiency"] == 1
    hours = [size["best"]["cost"]["hours"] for size in sizes]
    assert hours == sorted(hours, reverse=True)
    code, out, _ = run_main(capsys, *words, "--deadline", f"{hours[1] + 0.1}h")
    assert [size["gpus"] for size in json.loads(out)["sizes"]] == [16, 32]
    code, out, _ = run_main(capsys, *words, "--budget", "1")
    assert code == 1
    assert json.loads(out)["sizes"] == []


def test_the_cheapest_card_to_debug_on(capsys):
    code, out, _ = run_main(capsys, *SMALL, "--debug", "--json")
    assert code == 0
    cards = json.loads(out)["sizes"]
    prices = [card["best"]["cost"]["price_usd_per_gpu_hour"] for card in cards]
    assert prices == sorted(prices)
    assert all(card["best"]["verdict"] == "fits" for card in cards)
    assert cards[0]["gpu"] == "l4"


def test_given_price_and_provider(capsys):
    words = (*SMALL, "--tokens", "1G", "--batch-tokens", "524288", "--json")
    _, out, _ = run_main(capsys, *words, "--price", "2")
    assert json.loads(out)["candidates"][0]["cost"]["price_usd_per_gpu_hour"] == 2
    _, out, _ = run_main(capsys, *words, "--provider", "aws")
    assert json.loads(out)["candidates"][0]["cost"]["provider"] == "aws"
    code, _, err = run_main(capsys, *words, "--provider", "awz")
    assert code == 2
    assert "did you mean 'aws'" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "many"), "a number such as 64, or a range"),
        (("--gpus", "64..8"), "upwards"),
        (("--gpus", "0"), "at least 1"),
        (("--gpu", "h100"), "did you mean 'h100-sxm'"),
        (("--seq", "1.5"), "--seq"),
        (("--batch-tokens", "1000"), "nearest: 1024"),
        (("--deadline", "soon"), "14d or 36h"),
        (("--deadline", "3d"), "need --tokens"),
        (("--objective", "fame"), "time or cost"),
    ],
)
def test_mistakes(capsys, words, message):
    code, _, err = run_main(capsys, *SMALL, *words)
    assert code == 2
    assert message in err


def test_precisions_are_ranked_together(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    words = ("plan", "llama3-8b", "--gpu", "h100-sxm", "--gpus", "16", "--seq", "8192", "--precision", "bf16,fp8")
    code, out, _ = run_main(capsys, *words, "--json", "-o", path)
    assert code == 0
    answer = json.loads(out)
    names = [item["precision"] for item in answer["candidates"]]
    assert set(names) <= {"bf16", "fp8"}
    assert names[0] == "fp8"
    rates = [item["time"]["tokens_per_second_per_gpu"] for item in answer["candidates"]]
    assert rates == sorted(rates, reverse=True)
    assert any("fp8 instead of bf16 changes what is learned" in note for note in answer["notes"])
    assert load_run(path).recipe.precision.name == "fp8"
    _, alone, _ = run_main(capsys, *words[:-2], "--json")
    plain = json.loads(alone)
    assert {item["precision"] for item in plain["candidates"]} == {"bf16"}
    assert answer["searched"] == 2 * plain["searched"]
    assert not any("changes what is learned" in note for note in plain["notes"])
    _, table, _ = run_main(capsys, *words, "--top", "1")
    assert "precision" in table and "fp8" in table


def test_two_cpu_ranks(capsys):
    code, out, _ = run_main(capsys, "plan", "tiny-llama", "--gpu", "cpu", "--gpus", "2", "--seq", "256",
                            "--precision", "fp32", "--json")  # fmt: skip
    assert code == 0
    answer = json.loads(out)
    assert {item["verdict"] for item in answer["candidates"]} == {"unknown"}
    assert any("how much memory cpu has is unknown" in note for note in answer["notes"])
    assert any("benchmarks.cpu_figures" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("gpu", "precision", "message"),
    [
        ("a100-80-sxm", "bf16,fp8", "a100-80-sxm: its peak rate for fp8 is not known; known: bf16"),
        ("cpu", "bf16", "known: fp32"),
        ("h100-sxm", "fp8,fp4", "its peak rate for fp4 is not known; known: bf16, fp8"),
        ("h100-sxm", "fp9", "did you mean 'fp8'"),
        ("h100-sxm", "", "unknown precision ''"),
    ],
)
def test_precisions_that_a_chip_has_not(capsys, gpu, precision, message):
    code, out, err = run_main(capsys, "plan", "gpt2-124m", "--gpu", gpu, "--gpus", "8", "--seq", "1024",
                              "--precision", precision)  # fmt: skip
    assert (code, out) == (2, "")
    assert message in err
    code, out, err = run_main(capsys, "plan", "gpt2-124m", "--gpu", gpu, "--gpus", "8..16", "--seq", "1024",
                              "--precision", precision)  # fmt: skip
    assert (code, out) == (2, "")
    assert message in err


def test_precisions_of_a_sweep_and_of_a_card(capsys):
    words = ("plan", "gpt2-124m", "--gpu", "h100-sxm", "--seq", "1024", "--precision", "bf16,fp8", "--json")
    _, out, _ = run_main(capsys, *words, "--gpus", "8..16")
    assert [size["best"]["precision"] for size in json.loads(out)["sizes"]] == ["fp8", "fp8"]
    _, out, _ = run_main(capsys, *words[:-2], "fp8", "--gpus", "1", "--debug", "--json")
    cards = [card["gpu"] for card in json.loads(out)["sizes"]]
    assert "l4" in cards and "a100-80-sxm" not in cards


DIMENSIONS = "layers: 4\nhidden: 128\nheads: 4\nffn: 384\nvocabulary: 320\nmax_sequence: 2048\n"


def test_a_model_may_be_a_yaml_file(capsys, tmp_path):
    files = {"mine.yaml": DIMENSIONS, "changed.yml": "preset: tiny-llama\nlayers: 8\n",
             "run.yaml": "model: tiny-gpt\ncluster: {gpu: cpu}\nrecipe: {}\n"}  # fmt: skip
    for (name, text), title in zip(files.items(), ("mine", "tiny-llama", "tiny-gpt"), strict=True):
        (tmp_path / name).write_text(text)
        code, out, _ = run_main(capsys, "plan", tmp_path / name, *SMALL[2:-1], "512", "--top", "1")
        assert code == 0
        assert out.startswith(f"{title} on 8 × h100-sxm")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 3\n", "a Model's fields, or a Run, is expected"),
        ("hiden: 3\n", "did you mean 'hidden'"),
        ("model: {layerz: 3}\n", "did you mean 'layers'"),
        ("model: other.yaml\n", "its model is in another YAML file, other.yaml; give that one"),
        ("model: [3\n", "not valid YAML"),
    ],
)
def test_yaml_files_that_are_no_model(capsys, tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    code, _, err = run_main(capsys, "plan", path, *SMALL[2:])
    assert code == 2
    assert f"{path}" in err and message in err


def test_a_missing_yaml_file_is_said(capsys):
    code, _, err = run_main(capsys, "plan", "absent-model.yaml", *SMALL[2:])
    assert code == 2
    assert "absent-model.yaml: no such file" in err


def test_an_unknown_model_is_named(capsys):
    code, _, err = run_main(capsys, "plan", "lama3-8b", "--gpu", "h100-sxm", "--gpus", "8", "--seq", "8192")
    assert code == 2
    assert "did you mean 'llama3-8b'" in err


def test_sizes():
    assert parse_sizes("8..64") == [8, 16, 32, 64]
    assert parse_sizes("12") == [12]


def test_torch_is_never_imported():
    code = f"import sys; from shardwise.cli.main import main; main({list(SMALL)!r}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
