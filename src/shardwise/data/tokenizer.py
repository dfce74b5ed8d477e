"""Tokenizers: UTF-8 bytes, a Hugging Face tokenizer.json, or an encoding of tiktoken."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from shardwise.data.index import TIKTOKEN, TOKENIZER
from shardwise.data.tiktoken_encoding import TiktokenTokenizer, encoding_names, load_encoding, table_sha256
from shardwise.spec import InputError
from shardwise.spec.noun import nearest

Kind = Literal["bytes", "huggingface", "tiktoken"]
CONTENT_FILES = {"huggingface": TOKENIZER, "tiktoken": TIKTOKEN}  # where a tokenizer lies beside its shards

# In this order: a chat tokenizer may have an end of turn beside its end of document.
_END_OF_DOCUMENT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "[EOS]",
)


class Tokenizer(Protocol):
    """Text to ids and back. `content` is the tokenizer's file, empty for bytes; `sha256` stands for it."""

    kind: Kind
    vocabulary: int  # ids are below it
    end_of_document: int
    content: bytes

    @property
    def sha256(self) -> str: ...

    def encode(self, text: str) -> npt.NDArray[np.integer]:
        """Ids of the text and nothing else; the name of a special token inside it is ordinary text."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text; special tokens stand for none, and bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """[vocabulary]: the UTF-8 bytes of text that each id stands for; 0 for special tokens."""


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """`bytes`, an encoding of tiktoken, or the path of a tokenizer.json (or of its directory). Raises InputError."""
    if spec == "bytes":
        return ByteTokenizer()
    path, names = Path(spec), encoding_names()
    if spec in names:  # a directory of the same name can be written ./gpt2
        return load_encoding(str(spec))
    near = None if "/" in str(spec) or path.suffix else nearest(str(spec), ["bytes", *names])
    if near and not path.exists():
        raise InputError(f"tokenizer {spec}: no such file; did you mean '{near}'?")
    try:
        path = path / TOKENIZER if path.is_dir() else path
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"tokenizer {path}: cannot be read: {error.strerror}; give 'bytes', one of {', '.join(names)}, or the path "
            "of a tokenizer.json"
        ) from None
    return HuggingFaceTokenizer(content, f"tokenizer {path}")


def tokenizer_from(kind: Kind, content: bytes, where: str) -> Tokenizer:
    """From what was stored beside the shards. Raises InputError."""
    if kind == "bytes":
        return ByteTokenizer()
    return TiktokenTokenizer(content) if kind == "tiktoken" else HuggingFaceTokenizer(content, where)


def content_sha256(kind: str, content: bytes) -> str:
    """The `sha256` of a tokenizer, without building it. Raises ValueError for content that is no JSON."""
    return table_sha256(content) if kind == "tiktoken" else hashlib.sha256(content).hexdigest()


class ByteTokenizer:
    """Ids 0–255 are bytes; 256 ends a document."""

    kind: Kind = "bytes"
    vocabulary = 257
    end_of_document = 256
    content = b""
    sha256 = ""

    def encode(self, text: str) -> npt.NDArray[np.integer]:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: npt.ArrayLike) -> str:
        array = np.asarray(ids, dtype=np.int64)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int32]:
        return (np.arange(self.vocabulary) < 256).astype(np.int32)


class HuggingFaceTokenizer:
    """The content of a tokenizer.json, read with the `tokenizers` library."""

    kind: Kind = "huggingface"

    def __init__(self, content: bytes, where: str) -> None:
        from tokenizers import Tokenizer as Backend  # here, because the others do without it

        self.content, self._where = content, where
        try:
            self._backend = Backend.from_buffer(content)
            self._settings: dict[str, Any] = json.loads(content)
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{where}: not a Hugging Face tokenizer.json: {error}") from None
        # A file may carry the truncation and padding of whoever saved it; either would change documents silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self._ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocabulary = max(self._ids.values(), default=-1) + 1  # ids may have holes
        ends = [self._ids[name] for name in _END_OF_DOCUMENT if name in self._ids]
        if not ends:
            raise InputError(
                f"{where}: has no end-of-document token; add a special token with one of the names "
                f"{', '.join(_END_OF_DOCUMENT)}"
            )
        self.end_of_document = ends[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFaceTokenizer, (self.content, self._where)

    @property
    def sha256(self) -> str:
        return content_sha256(self.kind, self.content)

    def encode(self, text: str) -> npt.NDArray[np.integer]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)  # fast: without offsets
        return np.array(encoding.ids, dtype=np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        text: str = self._backend.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)
        return text

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Byte-level BPE writes each byte as one character; others write U+2581 for a space and <0x0A> for a byte."""
        byte_level = '"ByteLevel"' in json.dumps([self._settings.get("pre_tokenizer"), self._settings.get("decoder")])
        added = self._backend.get_added_tokens_decoder()
        sizes = np.zeros(self.vocabulary, dtype=np.int32)
        for token, index in self._ids.items():
            if index in added:
                sizes[index] = 0 if added[index].special else len(token.encode())
            elif byte_level:
                sizes[index] = len(token)
            elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                sizes[index] = 1
            else:
                sizes[index] = len(token.replace("▁", " ").encode())
        sizes[self.end_of_document] = 0  # even where the file does not mark it as special
        return sizes
