"""`shardwise doctor`: a slow run, an out-of-memory message, a memory snapshot."""

import json
import pickle

import pytest

from shardwise.cli.main import main
from shardwise.profiling.oom import parse_oom
from shardwise.profiling.snapshot import load_snapshot
from shardwise.spec import InputError
from shardwise.spec.memory import GIB

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 3.21 GiB is free. Including non-PyTorch memory, this process has 75.89 GiB memory in use. Of the "
    "allocated memory 61.90 GiB is allocated by PyTorch, and 12.50 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 39.59 GiB total capacity; 36.95 GiB already "
    "allocated; 2.19 MiB free; 37.50 GiB reserved in total by PyTorch)"
)
SHARED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB of which 512.00 MiB is "
    "free. Process 4711 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has 48.00 GiB memory "
    "in use. Of the allocated memory 46.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools "
    "(e.g., CUDA Graphs), and 300.00 MiB is reserved by PyTorch but unallocated."
)
MODEL = ("llama3-8b", "--gpu", "h100-sxm", "--gpus", "8", "--seq", "8192")


def run(capsys, *words):
    code = main(["doctor", *map(str, words)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def document(capsys, *words):
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_messages_of_every_torch():
    new, old, shared = (parse_oom(text, "log") for text in (NEW, OLD, SHARED))
    assert (new.tried, new.total, new.free) == (7.83 * GIB, 79.11 * GIB, 3.21 * GIB)
    assert new.unallocated == pytest.approx(12.5 * GIB)
    assert new.outside == pytest.approx((75.89 - 74.4) * GIB)
    assert new.fragmented
    assert (old.tried, old.reserved) == (20 * 2**20, 37.5 * GIB)
    assert old.unallocated == pytest.approx(0.55 * GIB)
    assert old.in_use is None
    assert shared.others == pytest.approx((79.11 - 0.5 - 48) * GIB)
    assert (shared.pools, shared.fragmented) == (GIB, False)


def test_a_fragmented_message_without_a_model(capsys, tmp_path):
    log = tmp_path / "log"
    log.write_text(f"step 3\n{NEW}\n")
    code, out, _ = run(capsys, "--oom", log)
    assert code == 0
    assert "fragmentation: 12.50 GiB are reserved" in out
    assert "1. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in out


def test_memory_that_others_hold(capsys, tmp_path):
    log = tmp_path / "log"
    log.write_text(SHARED)
    answer = document(capsys, "--oom", log)
    assert answer["remedies"][0]["change"] == "end the other processes on this GPU"
    assert answer["oom"]["pools_gib"] == 1


def test_the_tensor_that_did_not_fit_is_named(capsys, tmp_path):
    log = tmp_path / "log"
    log.write_text(NEW)
    answer = document(capsys, *MODEL, "--layout.dp_shard", "8", "--layout.micro_batch", "2", "--oom", log)
    assert any("the logits of a micro-batch (16,384 tokens × 128,256) in fp32" in line for line in answer["findings"])
    modelled = [item for item in answer["remedies"] if item["class"] == "modelled"]
    assert modelled[0]["change"].startswith("layout.micro_batch 2 → 1")
    assert modelled[0]["memory_gib"] < -7.83
    # No setting of the allocator helps a layout that the planner sees 50 GiB above the chip.
    assert answer["remedies"][0]["class"] == "modelled"


def test_a_run_that_is_slower_than_its_layout(capsys):
    words = (*MODEL, "--batch-tokens", "1048576", "--layout.recompute", "full")
    answer = document(capsys, *words, "--tokens-per-second-per-gpu", "2400")
    speed = answer["speed"]
    assert speed["measured"] < 0.9 * speed["predicted"] <= 0.9 * speed["best"]
    assert answer["layout"]["dp_shard"] == 8  # filled up
    assert speed["losses"][0] == {
        "what": "not explained by the model",
        "class": "measured",
        "seconds": pytest.approx(speed["step_seconds"] * (1 - speed["measured"] / speed["predicted"])),
    }
    assert all(item["tokens_per_second_per_gpu"] < speed["predicted"] for item in speed["mishaps"])
    assert "shardwise profile --trace" in answer["remedies"][0]["change"]
    assert any(item["change"].startswith("layout.recompute full → ") for item in answer["remedies"])


def test_a_run_that_is_as_fast_as_predicted_has_its_parts_modelled(capsys):
    words = (*MODEL, "--layout.recompute", "full", "--tokens-per-second-per-gpu")
    predicted = document(capsys, *words, "3000")["speed"]["predicted"]
    answer = document(capsys, *words, f"{predicted:.3f}")
    assert {loss["class"] for loss in answer["speed"]["losses"] if loss["seconds"] > 1e-3} == {"modelled"}
    assert answer["speed"]["mishaps"] == []
    assert "as fast as its layout allows" in answer["findings"][0]


def frames(*places):
    return [{"filename": filename, "line": 7, "name": name} for filename, name in places]


def write_snapshot(path):
    forward = frames(("??", "at::empty"), ("/site/torch/nn/functional.py", "linear"), ("/me/model.py", "forward"))
    update = frames(("/site/torch/optim/adamw.py", "_init_group"))
    blocks = [
        {"size": 3 * GIB, "state": "active_allocated", "frames": forward},
        {"size": 1 * GIB, "state": "inactive", "frames": []},
        {"size": 2 * GIB, "state": "active_allocated", "frames": update},
        {"size": 1 * GIB, "state": "inactive"},
        {"size": 1 * GIB, "state": "inactive"},
    ]
    events = [
        {"action": "alloc", "size": 4 * GIB},
        {"action": "free_completed", "size": 4 * GIB},
        {"action": "oom", "size": 2 * GIB},
    ]
    data = {"segments": [{"total_size": 8 * GIB, "blocks": blocks}], "device_traces": [events]}
    path.write_bytes(pickle.dumps(data))
    return path


def test_a_snapshot_by_part_and_place(capsys, tmp_path):
    path = write_snapshot(tmp_path / "snapshot.pickle")
    taken = load_snapshot(path)
    assert taken.parts == {"activations": 3 * GIB, "optimizer": 2 * GIB}
    assert (taken.sites[0].where, taken.sites[0].count) == ("model.py:7 forward", 1)
    assert (taken.reserved, taken.allocated, taken.largest_free) == (8 * GIB, 5 * GIB, GIB)
    assert (taken.peak, taken.tried, taken.fragmented) == (9 * GIB, 2 * GIB, True)
    answer = document(capsys, *MODEL, "--snapshot", path)
    assert answer["snapshot"]["parts_gib"] == {"activations": 3, "optimizer": 2}
    assert answer["remedies"][0]["change"] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    code, out, _ = run(capsys, "--snapshot", path)
    assert code == 0
    assert "3.00 GiB  activations" in out


class _Evil:
    def __reduce__(self):
        return (print, ("run!",))


def test_a_snapshot_that_would_run_code_is_refused(capsys, tmp_path):
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [_Evil()]}))
    with pytest.raises(InputError, match="not a snapshot that is safe to load"):
        load_snapshot(path)
    code, out, _ = run(capsys, "--snapshot", path)
    assert code == 2
    assert "run!" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of"),
        (["--tokens-per-second-per-gpu", "100"], "a MODEL, --gpu and --gpus are needed"),
        ([*MODEL, "--tokens-per-second-per-gpu", "-1"], "must be more than 0"),
        (
            [*MODEL, "--tokens-per-second-per-gpu", "80000"],
            "speed of all 8 GPUs together? One GPU would then do 10,000",
        ),
        (["llama3-8b", "--gpu", "h100-sxm", "--oom", "x"], "--gpus is missing"),
        ([*MODEL, "--oom", "nowhere.log"], "no such file"),
        (["--snapshot", "nowhere.pickle"], "no such file"),
        (["llama3-8c", "--gpu", "h100-sxm", "--gpus", "8", "--oom", "x"], "did you mean 'llama3-8b'"),
    ],
)
def test_mistakes(capsys, words, message):
    code, _, err = run(capsys, *words)
    assert code == 2
    assert message in err


def test_a_log_without_such_a_message(capsys, tmp_path):
    (tmp_path / "log").write_text("all is well\n")
    code, _, err = run(capsys, "--oom", tmp_path / "log")
    assert code == 2
    assert "no CUDA out-of-memory message" in err
