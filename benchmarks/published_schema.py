"""Reading a file of published runs (schema: ../shared/data/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.published_nouns import Row, Unusable

from shardwise.spec import InputError

# What the benchmark reads of each part. Any of it may be null or absent: unknown.
_TEXTS = {
    "model": ("name", "other"),
    "hardware": ("gpu", "inter_bw"),
    "layout": ("fsdp", "schedule", "framework", "precision", "recompute", "overlap", "other"),
    "measured": ("memory_what",),
}
_NUMBERS = {
    "model": ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "seq", "params", "experts", "topk",
              "moe_ffn", "shared_expert_ffn", "dense_layers"),
    "hardware": ("gpus", "gpus_per_node"),
    "layout": ("tp", "pp", "cp", "ep", "vpp", "zero_stage", "micro_batch", "global_batch"),
    "measured": ("step_time_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu", "memory_gb"),
}  # fmt: skip
_FLAGS = {"model": ("tied", "gated_mlp"), "layout": ("sp", "compile"), "measured": ("oom",)}
_MAY_BE_ZERO = ("shared_expert_ffn", "dense_layers", "zero_stage")


def read_rows(path: Path) -> list[Row]:
    """Every row, with null for what it leaves out. Raises InputError where the file is missing or a line is no row."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: {why}; expected a file of published runs, one JSON object a line") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            raise InputError(f"{path}, line {number}: no row with an id; expected the schema of published_runs.jsonl")
        for part in ("model", "hardware", "layout", "measured"):
            if not isinstance(row.get(part), dict):
                raise InputError(f"{path}, line {number}: no {part!r}; expected the schema of published_runs.jsonl")
        rows.append(_complete(row))
    return rows


def _complete(row: Row) -> Row:
    filled: dict[str, Any] = {"set": "", "quality": None, "mfu_notes": None, **row}
    filled |= {part: row.get(part) or {} for part in ("source", "derived")}
    for part in ("model", "hardware", "layout", "measured"):
        known = (*_TEXTS.get(part, ()), *_NUMBERS.get(part, ()), *_FLAGS.get(part, ()))
        filled[part] = {**dict.fromkeys((*known, "mla") if part == "model" else known), **row[part]}
    return filled


def check(row: Row) -> None:
    """Raises Unusable where a field is not of the schema's kind."""
    for kinds, accepts, expected in (
        (_TEXTS, lambda value, key: isinstance(value, str), "text"),
        (_NUMBERS, _is_number, "a positive number, whole except where measured"),
        (_FLAGS, lambda value, key: isinstance(value, bool), "true or false"),
    ):
        for part, keys in kinds.items():
            for key in keys:
                value = row[part][key]
                if value is not None and not accepts(value, key):
                    raise Unusable(f"{part}.{key} is {value!r}, expected {expected}")
    if row["model"]["mla"] is not None and not isinstance(row["model"]["mla"], dict):
        raise Unusable(f"model.mla is {row['model']['mla']!r}, expected an object")


def _is_number(value: object, key: str) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if key in _NUMBERS["measured"]:  # some sources truncate a small rate to 0, which tells nothing
        return value >= 0
    return value == int(value) and (value > 0 or (value == 0 and key in _MAY_BE_ZERO))
