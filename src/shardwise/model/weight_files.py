"""Safetensors files of transformers, one tensor at a time: a model need not fit into host memory.

The safetensors package writes files from tensors that are all there; here only shapes are known when the header is
written (https://huggingface.co/docs/safetensors/index#format).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Size, Tensor

from shardwise.spec import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"fp32": ("F32", torch.float32), "bf16": ("BF16", torch.bfloat16)}


class WeightFiles:
    """The weights of a directory that `save_pretrained` or `write_weights` wrote: `shapes` by name, and `load`.

    Raises InputError naming the file that is missing or damaged.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, Any] = {}  # open files by name
        self._places: dict[str, str] = {}  # tensor -> file
        self.shapes: dict[str, Size] = {}
        for file in _file_names(directory):
            path = directory / file
            try:
                self._files[file] = opened = safe_open(path, "pt")
                for name in opened.keys():  # noqa: SIM118 it is no mapping
                    self._places[name] = file
                    self.shapes[name] = Size(opened.get_slice(name).get_shape())
            except FileNotFoundError:
                raise InputError(f"{path}: no such file, although {INDEX} names it") from None
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path}: is damaged or cannot be read: {error}") from None

    def load(self, name: str) -> Tensor:
        """One tensor on the CPU, of the dtype that it is stored in."""
        file = self._places[name]
        try:
            tensor: Tensor = self._files[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self.directory / file}: {name} cannot be read: {error}") from None
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise InputError(f"{self.directory / file}: {name} is {tensor.dtype}: quantized weights cannot be imported")
        return tensor


def _file_names(directory: Path) -> list[str]:
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index}: is damaged or cannot be read: {error}") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise InputError(f"{index}: names a file outside of its directory: {name!r}")
        return names
    if (directory / SINGLE).is_file():
        return [SINGLE]
    pickled = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    if pickled:
        raise InputError(
            f"{directory}: has {pickled[0]}, a pickle, which could run code when opened, and no safetensors; convert "
            "it with transformers: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    raise InputError(f"{directory}: has neither {SINGLE} nor {INDEX}")


def write_weights(
    directory: Path, shapes: dict[str, Size], tensors: Iterable[Tensor], *, dtype: str, max_shard_bytes: int
) -> None:
    """Write tensors, which come in the order of `shapes`, as `fp32` or `bf16` into one file, or several with an index.

    A file holds at most `max_shard_bytes` of tensors, but one at least. Raises OSError.
    """
    size = DTYPES[dtype][1].itemsize
    shards: list[dict[str, Size]] = [{}]
    room = max_shard_bytes
    for name, shape in shapes.items():
        room -= shape.numel() * size
        if room < 0 and shards[-1]:
            shards.append({})
            room = max_shard_bytes - shape.numel() * size
        shards[-1][name] = shape
    source = iter(tensors)
    if len(shards) == 1:
        _write_file(directory / SINGLE, shards[0], source, dtype)
        return
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        _write_file(directory / file, shard, source, dtype)
    total = sum(shape.numel() for shape in shapes.values())
    index = {
        "metadata": {"total_parameters": total, "total_size": total * size},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2))


def _write_file(path: Path, shapes: dict[str, Size], tensors: Iterator[Tensor], dtype: str) -> None:
    code, torch_dtype = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that does not say so
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + shape.numel() * torch_dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            tensor = next(tensors)
            assert tensor.shape == shape
            stream.write(tensor.to(torch_dtype).contiguous().view(torch.uint8).numpy())
            del tensor  # before the next one is loaded
        stream.flush()
        os.fsync(stream.fileno())
