"""A memory snapshot of torch.cuda.memory._dump_snapshot: what is allocated, by whom, and how broken up the rest is.

A pickle may run anything when it is loaded, so that only plain containers, strings and numbers are let through.
"""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.spec import InputError

# A part of the memory by what stands in an allocation's stack; the first that fits counts.
_PARTS = (
    ("optimizer", ("/optim/", "optimizer.py", "adamw", "muon")),
    ("logits", ("cross_entropy", "log_softmax", "nll_loss", "chunked_loss", "loss.py")),
    ("gathered", ("_fsdp", "fully_shard", "all_gather", "flat_param", "reduce_scatter")),
    ("gradients", ("accumulate_grad", "accumulategrad")),
    ("backward", ("autograd/graph.py", "_engine_run_backward", "::backward", "backward(", "torch/autograd")),
    ("activations", ("forward", "_call_impl", "functional.py")),
    ("parameters", ("materialize", "__init__", "_apply", "to_empty", "load_state_dict", "init.py")),
)
UNKNOWN = "no stack recorded"


@dataclass(frozen=True)
class Site:
    """Live bytes that were allocated in one place of the program."""

    where: str
    part: str
    size: float
    count: int


@dataclass(frozen=True)
class Snapshot:
    """Bytes. allocated: in tensors; reserved: taken from the driver; largest_free: the largest free block of a segment.
    peak: highest of the recorded history, None where that was not recorded. tried: of an allocation that failed."""

    allocated: float
    reserved: float
    largest_free: float
    segments: int
    parts: dict[str, float]
    sites: tuple[Site, ...]
    peak: float | None = None
    tried: float | None = None

    @property
    def unallocated(self) -> float:
        return self.reserved - self.allocated

    @property
    def fragmented(self) -> bool:
        """Whether a fifth of what is reserved is in no tensor, most of it in small pieces."""
        return self.unallocated > 0.2 * self.reserved and self.largest_free < 0.5 * self.unallocated


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot holds plain containers alone")


def load_snapshot(path: Path, top: int = 8) -> Snapshot:
    """Raises InputError: no such file, not a snapshot, or a pickle that would run code."""
    try:
        with path.open("rb") as file:
            data = _load(file)
    except FileNotFoundError:
        raise InputError(f"--snapshot {path}: no such file") from None
    except OSError as error:
        raise InputError(f"--snapshot {path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a broken pickle raises whatever it likes
        raise InputError(f"--snapshot {path}: not a snapshot that is safe to load: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
        raise InputError(f"--snapshot {path}: no segments in it: not a file of torch.cuda.memory._dump_snapshot()")
    return _read(data, top)


def _load(file: BinaryIO) -> Any:
    return _Plain(file).load()


def _read(data: dict[str, Any], top: int) -> Snapshot:
    allocated = reserved = largest = 0.0
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    parts: Counter[str] = Counter()
    for segment in data["segments"]:
        reserved += segment.get("total_size", 0)
        for block in segment.get("blocks", ()):
            size = block.get("size", 0)
            if not str(block.get("state", "")).startswith("active"):
                largest = max(largest, size)
                continue
            allocated += size
            frames = block.get("frames") or [
                frame for entry in block.get("history", ())[:1] for frame in entry.get("frames", ())
            ]
            key = _where(frames), _part(frames)
            sizes[key] += size
            counts[key] += 1
            parts[key[1]] += size
    sites = tuple(Site(where, part, size, counts[where, part]) for (where, part), size in sizes.most_common(top))
    peak, tried = _history(data.get("device_traces") or [], allocated)
    return Snapshot(allocated, reserved, largest, len(data["segments"]), dict(parts.most_common()), sites, peak, tried)


def _part(frames: list[dict[str, Any]]) -> str:
    if not frames:
        return UNKNOWN
    text = "\n".join(f"{frame.get('filename', '')} {frame.get('name', '')}" for frame in frames).lower()
    return next((part for part, words in _PARTS if any(word in text for word in words)), "other")


def _where(frames: list[dict[str, Any]]) -> str:
    """The innermost frame of Python outside torch; else of Python; else any."""
    if not frames:
        return UNKNOWN
    python = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")]
    own = [frame for frame in python if "/torch/" not in str(frame.get("filename"))]
    frame = (own or python or frames)[0]
    name = Path(str(frame.get("filename", "?"))).name
    return f"{name}:{frame.get('line', '?')} {frame.get('name', '')}".strip()


def _history(traces: list[Any], now: float) -> tuple[float | None, float | None]:
    """Backwards from what is allocated now, the highest that it was."""
    events: list[dict[str, Any]] = max(traces, key=len, default=[])
    tried = next((event.get("size") for event in reversed(events) if event.get("action") == "oom"), None)
    if not events:
        return None, tried
    live = peak = now
    for event in reversed(events):
        if event.get("action") == "alloc":
            live -= event.get("size", 0)
        elif event.get("action") == "free_completed":
            live += event.get("size", 0)
        peak = max(peak, live)
    return peak, tried
