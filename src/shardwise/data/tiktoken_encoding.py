"""Encodings of tiktoken, such as `gpt2`. Their tables are stored with the data, which can then be read offline."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import threading
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardwise.data.files import missing_package
from shardwise.spec import InputError

ENCODINGS = ("cl100k_base", "gpt2", "o200k_base", "o200k_harmony", "p50k_base", "p50k_edit", "r50k_base")

_END_OF_DOCUMENT = "<|endoftext|>"
_LONGEST_REASON = 120
_DOWNLOAD_SECONDS = 120.0  # tiktoken itself would wait for ever


class TiktokenTokenizer:
    """An encoding, from its table: JSON with name, pattern, special_tokens, and ranks of base64 tokens."""

    kind: Literal["bytes", "huggingface", "tiktoken"] = "tiktoken"

    def __init__(self, content: bytes) -> None:
        self.content = content
        try:
            self._table: dict[str, Any] = json.loads(content)
            self._ranks = {base64.b64decode(token): rank for token, rank in self._table["ranks"].items()}
            special: dict[str, int] = self._table["special_tokens"]
            self.end_of_document = special[_END_OF_DOCUMENT]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"the tokenizer's table is damaged ({error!r}); prepare the data again") from None
        self.vocabulary = max(*self._ranks.values(), *special.values()) + 1  # ids may have holes
        self._bytes = [b""] * self.vocabulary
        for token, rank in self._ranks.items():
            self._bytes[rank] = token

    def __reduce__(self) -> tuple[Any, ...]:
        return TiktokenTokenizer, (self.content,)

    @functools.cached_property
    def sha256(self) -> str:
        return table_sha256(self.content)

    @functools.cached_property
    def _encoding(self) -> Any:
        name = self._table["name"]
        if missing := missing_package("tiktoken", "tiktoken"):
            raise InputError(f"tokenizer {name}: {missing}")
        import tiktoken

        return tiktoken.Encoding(
            name=name,
            pat_str=self._table["pattern"],
            mergeable_ranks=self._ranks,
            special_tokens=self._table["special_tokens"],
        )

    def encode(self, text: str) -> npt.NDArray[np.integer]:
        ids: npt.NDArray[np.integer] = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ids

    def decode(self, ids: npt.ArrayLike) -> str:
        return b"".join(self._bytes[index] for index in np.asarray(ids, dtype=np.int64)).decode(errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int32]:
        return np.array([len(token) for token in self._bytes], dtype=np.int32)


def table_sha256(content: bytes) -> str:
    """Over all but the pattern, which versions of tiktoken write differently without changing what it matches."""
    table = {key: value for key, value in json.loads(content).items() if key != "pattern"}
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def encoding_names() -> tuple[str, ...]:
    """Those of tiktoken itself, and of its plugins where it is installed."""
    if missing_package("tiktoken", "tiktoken"):
        return ENCODINGS
    import tiktoken

    return tuple(sorted({*ENCODINGS, *tiktoken.list_encoding_names()}))


def load_encoding(name: str) -> TiktokenTokenizer:
    """From tiktoken's cache, or from the network. Raises InputError where neither works."""
    if missing := missing_package("tiktoken", "tiktoken"):
        raise InputError(f"tokenizer {name}: {missing}; a tokenizer.json works without it")
    import tiktoken

    outcome: list[Any] = []

    def load() -> None:
        try:
            outcome.append(tiktoken.get_encoding(name))
        except Exception as error:  # of whichever library downloads
            outcome.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(_DOWNLOAD_SECONDS)
    encoding = outcome[0] if outcome else TimeoutError(f"no answer within {_DOWNLOAD_SECONDS:.0f} seconds")
    if isinstance(encoding, Exception):
        reason = f"{type(encoding).__name__}: {encoding}".splitlines()[0]
        reason = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}…"
        raise InputError(
            f"tokenizer {name}: its vocabulary file is not in tiktoken's cache and could not be downloaded ({reason}); "
            "set TIKTOKEN_CACHE_DIR to a directory that holds it, or give the path of a tokenizer.json instead"
        )
    ranks = sorted((rank, base64.b64encode(token).decode()) for token, rank in encoding._mergeable_ranks.items())
    table = {
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "special_tokens": encoding._special_tokens,
        "ranks": {token: rank for rank, token in ranks},
    }
    return TiktokenTokenizer(json.dumps(table, indent=0).encode())
