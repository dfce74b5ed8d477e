"""Token shards of llm.c and modded-nanogpt, read as they are."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shardwise.data import bins as bins_module
from shardwise.data import check_vocabulary, open_data, read_windows
from shardwise.spec import InputError

GPT2 = (20240520, 1, "<u2")
LLAMA3 = (20240801, 7, "<u4")
END = 50256


def write(path: Path, ids: list[int], form: tuple[int, int, str] = GPT2, claimed: int | None = None) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = form[0], form[1], len(ids) if claimed is None else claimed
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header.tobytes() + np.array(ids, form[2]).tobytes())


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two train files and one of validation; no tokenizer is near."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "no-cache"))
    directory = tmp_path / "bins"
    write(directory / "fineweb_val_000000.bin", [END, 7, 8, 9])
    write(directory / "fineweb_train_000002.bin", [5, 6, END, 1])
    write(directory / "fineweb_train_000001.bin", [END, 1, 2, 3, END, 4])
    (directory / "notes.txt").write_text("not read")
    return directory


def gpt2_like(path: Path) -> None:
    """A tokenizer.json with as many ids as GPT-2's: the bytes first, then words that never occur."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"word{number}" for number in range(END - 256)), "<|endoftext|>"]
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(path))


def test_files_in_the_order_of_their_names(directory: Path) -> None:
    data = open_data(directory)
    assert data.train.read(0, data.train.tokens).tolist() == [END, 1, 2, 3, END, 4, 5, 6, END, 1]  # type: ignore[union-attr]
    assert data.validation.read(0, 4).tolist() == [END, 7, 8, 9]  # type: ignore[union-attr]
    inputs, labels = read_windows(data.train, np.array([0, 1, 2]), 4, 50257)
    assert inputs.tolist() == [[END, 1, 2, 3], [END, 4, 5, 6], [END, 0, 0, 0]]
    assert labels.tolist() == [[1, 2, 3, END], [4, 5, 6, END], [1, -100, -100, -100]]
    assert data.order(4, 2, 0).targets(0) + data.order(4, 2, 0).targets(1) >= 9
    assert (data.identity.vocabulary, data.identity.end_of_document) == (50257, END)
    assert isinstance(data.train._map(0), np.memmap)  # type: ignore[union-attr]


def test_llama3(tmp_path: Path) -> None:
    write(tmp_path / "train.bin", [128000, 70_000, 1], LLAMA3)
    data = open_data(tmp_path)
    assert data.train.read(0, 3).tolist() == [128000, 70_000, 1]  # type: ignore[union-attr]
    assert data.validation.tokens == 0
    assert (data.identity.vocabulary, data.identity.end_of_document, data.token_bytes) == (128256, 128000, None)
    check_vocabulary(data, 128256)
    with pytest.raises(InputError, match=r"holds token id 128000; model\.vocabulary is 50304"):
        check_vocabulary(data, 50304)
    with pytest.raises(InputError, match="put Llama 3's tokenizer.json beside the .bin files"):
        data.tokenizer  # noqa: B018


def test_the_fingerprint_follows_names_sizes_and_content(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bins_module, "_HASHED_BYTES", 1028)
    prints = [open_data(directory).fingerprint]
    directory.rename(directory.with_name("moved"))
    directory = directory.with_name("moved")
    assert open_data(directory).fingerprint == prints[0]
    for ids in ([END, 1, 2, 3, END, 5], [END, 9, 2, 3, END, 4], [END, 1, 2, 3, END, 4, 4]):
        write(directory / "fineweb_train_000001.bin", ids)
        prints.append(open_data(directory).fingerprint)
    (directory / "fineweb_train_000001.bin").rename(directory / "fineweb_train_000003.bin")
    prints.append(open_data(directory).fingerprint)
    (directory / "fineweb_val_000000.bin").unlink()
    prints.append(open_data(directory).fingerprint)
    assert len(set(prints)) == len(prints)


def test_bytes_are_known_only_where_the_tokenizer_is(directory: Path, tmp_path: Path) -> None:
    assert open_data(directory).token_bytes is None
    gpt2_like(directory / "tokenizer.json")
    data = open_data(directory)
    assert data.token_bytes is not None
    assert data.token_bytes[:256].tolist() == [1] * 256 and data.token_bytes[END] == 0
    assert len(data.token_bytes) == 50257 == data.tokenizer.vocabulary
    assert data.tokenizer.decode(data.tokenizer.encode("né")) == "né"


def test_another_tokenizer_beside_them_is_refused(directory: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    backend.save(str(directory / "tokenizer.json"))
    with pytest.raises(InputError, match=r"tokenizer\.json: has 2 ids, .* GPT-2's, which has 50,257"):
        open_data(directory).token_bytes  # noqa: B018


FAULTS = {
    "truncated": ("train_1.bin: is truncated: 1,028 bytes; its header says 3 tokens, so 1,030", GPT2, [1, 2], 3),
    "too long": ("train_1.bin: is too long: 1,028 bytes; its header says 1 tokens, so 1,026", GPT2, [1, 2], 1),
    "no token": ("train_1.bin: is too long|train_1.bin: is truncated", GPT2, [], 0),
    "negative": ("train_1.bin: is too long", GPT2, [1], -5),
    "magic": (r"not a token shard of llm.c: it starts with 7; expected: 20240520 \(GPT-2\)", (7, 1, "<u2"), [1], None),
    "version": ("has version 2; GPT-2's shards have 1", (20240520, 2, "<u2"), [1], None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(tmp_path: Path, name: str) -> None:
    message, form, ids, claimed = FAULTS[name]
    write(tmp_path / "train_1.bin", ids, form, claimed)
    with pytest.raises(InputError, match=message):
        open_data(tmp_path)


def test_faults_of_directories(directory: Path, tmp_path: Path) -> None:
    write(directory / "z_train.bin", [1], LLAMA3)
    with pytest.raises(InputError, match="fineweb_train_000001.bin holds GPT-2's tokens and z_train.bin Llama 3's"):
        open_data(directory)
    write(directory / "train_val.bin", [1])
    with pytest.raises(InputError, match="its name says both train and val; rename it"):
        open_data(directory)
    write(tmp_path / "only" / "fineweb_val_0.bin", [1])
    with pytest.raises(InputError, match=r"only: has \.bin files, but none is named \*train\*\.bin"):
        open_data(tmp_path / "only")
    (tmp_path / "only" / "train.bin").write_bytes(b"short")
    with pytest.raises(InputError, match=r"train\.bin: is truncated: 5 bytes, and the header alone has 1,024"):
        open_data(tmp_path / "only")


def test_a_file_that_is_cut_while_it_is_used(directory: Path) -> None:
    data = open_data(directory)
    write(directory / "fineweb_train_000001.bin", [1, 2])
    with pytest.raises(InputError, match=r"fineweb_train_000001\.bin: is truncated"):
        data.train.read(0, 10)  # type: ignore[union-attr]


def test_an_id_outside_the_vocabulary_names_the_file(directory: Path) -> None:
    data = open_data(directory)
    with pytest.raises(InputError, match=r"fineweb_train_000001\.bin: token 0 has id 50256, outside the vocabulary"):
        read_windows(data.train, np.array([0]), 4, 50000)
