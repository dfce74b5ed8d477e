"""Tokenizers: bytes, and tokenizer.json files built here."""

import pickle
import threading
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shardwise.data import files as files_module
from shardwise.data import load_tokenizer, open_data, prepare
from shardwise.data import tiktoken_encoding as tiktoken_module
from shardwise.spec import InputError

CORPUS = ["the quick brown fox", "the lazy dog", "naïve café – ünïcode 😀"] * 20
TEXT = "the quick 😀 naïve\n\n  fox\tjumps\r\n"


def byte_level(path: Path, end: str = "<|endoftext|>") -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.enable_truncation(4)  # as left behind by whoever saved the file
    backend.enable_padding(length=64)
    backend.save(str(path))
    return path


def sentencepiece_like(path: Path) -> Path:
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for token in ("▁", "t", "h", "e", "▁t", "he", "▁the", "é"):
        vocabulary[token] = len(vocabulary)
    backend = Tokenizer(
        models.BPE(vocabulary, [("▁", "t"), ("h", "e"), ("▁t", "he")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.save(str(path))
    return path


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(TEXT)
    assert ids.tolist() == list(TEXT.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == TEXT
    assert tokenizer.decode([0xF0, 65]) == "\ufffdA" and tokenizer.decode([]) == ""
    assert (tokenizer.vocabulary, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [0]


def test_byte_level_bpe(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(path))
    ids = tokenizer.encode(TEXT)
    assert 4 < len(ids) < len(TEXT.encode())  # neither truncated nor padded, and merged
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.token_bytes()[ids].sum() == len(TEXT.encode())
    assert tokenizer.token_bytes()[tokenizer.end_of_document] == 0
    assert len(tokenizer.token_bytes()) == tokenizer.vocabulary == 300
    assert load_tokenizer(str(tmp_path)).sha256 == tokenizer.sha256  # the directory that holds it


def test_special_tokens_inside_text_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level(tmp_path / "tokenizer.json")))
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_spaces_and_bytes_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(sentencepiece_like(tmp_path / "tokenizer.json")))
    text = "the the é\n😀"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.end_of_document == 1


@pytest.mark.parametrize("end", ["<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>"])
def test_usual_names_of_the_end_of_document(tmp_path: Path, end: str) -> None:
    tokenizer = load_tokenizer(str(byte_level(tmp_path / "tokenizer.json", end)))
    assert tokenizer.end_of_document == 0


def test_faults(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no-end\.json: has no end-of-document token.*<\|endoftext\|>"):
        load_tokenizer(str(byte_level(tmp_path / "no-end.json", "<start>")))
    with pytest.raises(InputError, match=r"absent\.json: cannot be read: No such file.*'bytes'"):
        load_tokenizer(str(tmp_path / "absent.json"))
    for content in ("", "{}", "not json", "\udcff"):
        (tmp_path / "bad.json").write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(InputError, match=r"bad\.json: not a Hugging Face tokenizer\.json"):
            load_tokenizer(str(tmp_path / "bad.json"))


@pytest.fixture
def small_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken's gpt2, with only a few merges."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" q": 258, "ï".encode(): 300}
    small = tiktoken.Encoding(
        "gpt2", pat_str=r" ?\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 301}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: small)


def test_tiktoken(small_gpt2: None) -> None:
    tokenizer = load_tokenizer("gpt2")
    ids = tokenizer.encode(TEXT)
    assert 257 in ids and 258 in ids and 300 in ids
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == TEXT
    assert (tokenizer.vocabulary, tokenizer.end_of_document) == (302, 301)  # with holes
    sizes = tokenizer.token_bytes()
    assert sizes[ids].sum() == len(TEXT.encode())
    assert sizes[257:].tolist() == [3, 2, *[0] * 41, 2, 0]
    assert tokenizer.end_of_document not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>b")) == "a<|endoftext|>b"
    copy = pickle.loads(pickle.dumps(tokenizer))  # as workers get it
    assert (copy.encode(TEXT) == ids).all() and copy.sha256 == tokenizer.sha256


def test_data_keeps_a_tiktoken_table(tmp_path: Path, small_gpt2: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT, newline="")
    index = prepare(tmp_path / "a.txt", tmp_path / "out", "gpt2", validation_fraction=0, workers=1)
    monkeypatch.setattr(tiktoken, "get_encoding", None)  # neither the cache nor the network is asked again
    data = open_data(tmp_path / "out")
    assert data.tokenizer.decode(data.train.read(0, data.train.tokens)) == TEXT  # type: ignore[union-attr]
    assert data.tokenizer.encode(TEXT).tolist() == data.train.read(0, data.train.tokens - 1).tolist()  # type: ignore[union-attr]
    assert (index.tokenizer.kind, index.tokenizer.sha256) == ("tiktoken", data.tokenizer.sha256)
    table = tmp_path / "out" / "tiktoken.json"
    table.write_text(table.read_text().replace('"gpt2"', '"gpt3"'))
    with pytest.raises(InputError, match=r"tiktoken\.json: is corrupt: its SHA-256 differs from the index"):
        open_data(tmp_path / "out")
    table.write_text("{")
    with pytest.raises(InputError, match=r"tiktoken\.json: is corrupt"):
        open_data(tmp_path / "out")


def test_tiktoken_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(
        InputError,
        match=r"tokenizer gpt2: .* could not be downloaded \(ConnectionError: no route to host\); "
        r"set TIKTOKEN_CACHE_DIR to .* or give the path of a tokenizer\.json instead",
    ):
        load_tokenizer("gpt2")
    monkeypatch.setattr(tiktoken_module, "_DOWNLOAD_SECONDS", 0.01)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: threading.Event().wait(1))
    with pytest.raises(InputError, match="TimeoutError: no answer within"):
        load_tokenizer("gpt2")
    monkeypatch.setattr(files_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"tokenizer gpt2: needs a package .* pip install 'shardwise\[tiktoken\]'"):
        load_tokenizer("gpt2")


def test_names_of_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, near in (("gtp2", "gpt2"), ("cl100k", "cl100k_base"), ("byte", "bytes")):
        with pytest.raises(InputError, match=f"tokenizer {name}: no such file; did you mean '{near}'"):
            load_tokenizer(name)
    (tmp_path / "gpt2").mkdir()
    byte_level(tmp_path / "gpt2" / "tokenizer.json")
    assert load_tokenizer("./gpt2").vocabulary == 300  # a path, not the encoding


def test_prepare_keeps_the_tokenizer(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "mine.json")
    source = tmp_path / "source"
    source.mkdir()
    for number, text in enumerate([*CORPUS[:3], TEXT]):
        (source / f"{number}.txt").write_bytes(text.encode())
    index = prepare(source, tmp_path / "out", str(path), validation_fraction=0)
    path.unlink()
    data = open_data(tmp_path / "out")
    assert data.tokenizer.decode(data.train.read(0, data.train.tokens)) == "".join([*CORPUS[:3], TEXT])
    assert index.tokenizer.kind == "huggingface" and index.tokenizer.vocabulary == 300
    assert sum(file.text_bytes for file in index.train.files) == index.train.text_bytes
    assert data.token_bytes.tolist() == data.tokenizer.token_bytes().tolist()


def test_a_tokenizer_that_changes_text_is_reported(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "<eos>": 1, "the": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "words.json"))
    (tmp_path / "text.txt").write_text("the fox jumps\nthe dog\n")
    lines: list[str] = []
    prepare(tmp_path / "text.txt", tmp_path / "out", str(tmp_path / "words.json"), say=lines.append)
    assert any("this tokenizer changes text" in line for line in lines)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    vocabulary = {"<eos>": 70_000, "a": 69_999, "b": 3, "<unk>": 0}  # with holes
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "large.json"))
    (tmp_path / "text.txt").write_text("a b\n")
    index = prepare(tmp_path / "text.txt", tmp_path / "out", str(tmp_path / "large.json"), validation_fraction=0)
    data = open_data(tmp_path / "out")
    assert index.tokenizer.vocabulary == 70_001 and index.largest_id == 70_000
    assert data.train.read(0, 3).tolist() == [69_999, 3, 70_000]
    assert index.train.files[0].bytes == 128 + 3 * 4
