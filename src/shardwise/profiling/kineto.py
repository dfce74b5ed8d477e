"""Traces of PyTorch's profiler (Kineto, Chrome's Trace Event Format).

Names and fields: torch/csrc/profiler and libkineto/src/output_json.cpp of pytorch 2.11: categories kernel, gpu_memcpy,
gpu_memset, cuda_runtime, cuda_driver, cpu_op, user_annotation; args `correlation`, `External id`, `Collective name`,
`Process Group Name`, `Process Group Description`, `Input Dims`, `Input type`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardwise.profiling.names import WAITS, collective_of, kernel_kind, operator_kind, stream_of
from shardwise.profiling.roofline import Roofline
from shardwise.profiling.trace import (
    ANNOTATION,
    CALL,
    COMMUNICATION,
    OPERATOR,
    WAIT,
    Device,
    Host,
    Trace,
    Traffic,
)
from shardwise.spec import InputError

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
_CALLS = {"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "privateuse1_runtime"}


def parse_kineto(data: Any, source: str) -> Trace:
    """One rank's trace. Raises InputError where the document is none, or has no complete event."""
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise InputError(f"{source}: no traceEvents: not a trace of PyTorch's profiler")
    return _Parser(data if isinstance(data, dict) else {}, events, source).trace()


class _Parser:
    def __init__(self, data: dict[str, Any], events: list[Any], source: str):
        self._data, self._events, self._source = data, events, source
        self._names: dict[str, int] = {}
        self._traffics: dict[Traffic, int] = {}
        self._kinds: dict[str, int] = {}
        info = data.get("distributedInfo")
        self._info: dict[str, Any] = info if isinstance(info, dict) else {}
        chips = data.get("deviceProperties") or [{}]
        self._chip = chips[0].get("name") if isinstance(chips[0], dict) else None
        self._roofline = Roofline(self._chip)
        self._ranks: dict[tuple[Any, str], tuple[int, ...]] = {}
        self._groups = {
            str(group.get("pg_name")): str(group.get("pg_desc", ""))
            for group in self._info.get("pg_config") or []
            if isinstance(group, dict)
        }

    def trace(self) -> Trace:
        names, calls, device, host = self._names, {}, [], []
        shaped: dict[int, tuple[str, dict[str, Any]]] = {}
        has_device = any(event.get("cat") in _DEVICE for event in self._events)
        for event in self._events:
            if event.get("ph") != "X":
                continue
            category, name = event.get("cat"), event.get("name", "")
            if category in _DEVICE:
                device.append(event)
                continue
            if category in _CALLS:
                kind = WAIT if WAITS.search(name) else CALL
                correlation = event.get("args", {}).get("correlation")
                if correlation is not None:
                    calls[correlation] = event["ts"]
            elif category == "cpu_op":
                kind = OPERATOR
                arguments = event.get("args")
                if arguments and "Input Dims" in arguments and has_device:
                    shaped[arguments.get("External id", -1)] = name, arguments
            elif category == "user_annotation":
                kind = ANNOTATION
            else:
                continue
            host.append(
                (event["ts"], event.get("dur", 0), kind, names.setdefault(name, len(names)), event.get("tid", 0))
            )
        if not device and not host:
            raise InputError(f"{self._source}: no kernel, operator or annotation in it")
        rows = self._kernels(device, calls, shaped) if has_device else self._operators()
        return self._build(rows, host, on_cpu=not has_device)

    def _kernels(
        self, device: list[dict[str, Any]], calls: dict[int, float], shaped: dict[int, tuple[str, dict[str, Any]]]
    ) -> list[tuple[Any, ...]]:
        rows = []
        for event in device:
            name, arguments = event.get("name", ""), event.get("args") or {}
            kind = self._kinds.get(name)
            if kind is None:
                kind = self._kinds[name] = kernel_kind(name)
            traffic = self._traffic(name, arguments) if kind == COMMUNICATION else -1
            bound = np.nan
            if shaped and kind != COMMUNICATION:
                operator = shaped.get(arguments.get("External id", -1))
                if operator is not None:
                    bound = self._roofline.seconds(*operator)
            rows.append(
                (
                    event["ts"],
                    event.get("dur", 0),
                    kind,
                    self._names.setdefault(name, len(self._names)),
                    _number(arguments.get("stream", event.get("tid", 0))),
                    calls.get(arguments.get("correlation", -1), np.nan),
                    traffic,
                    bound,
                )
            )
        return rows

    def _operators(self) -> list[tuple[Any, ...]]:
        """On a CPU: the operators, and gloo's work on threads of its own."""
        rows = []
        for event in self._events:
            if event.get("ph") != "X":
                continue
            category, name = event.get("cat"), event.get("name", "")
            if name.startswith(("gloo:", "mpi:")):
                kind, traffic = COMMUNICATION, self._traffic(name, event.get("args") or {})
            elif category == "cpu_op" and _computes(name):
                kind, traffic = operator_kind(name), -1
            else:
                continue
            start = event["ts"]
            lane = _number(event.get("tid", 0))
            name_code = self._names.setdefault(name, len(self._names))
            rows.append((start, event.get("dur", 0), kind, name_code, lane, start, traffic, np.nan))
        return rows

    def _traffic(self, name: str, arguments: dict[str, Any]) -> int:
        collective = collective_of(str(arguments.get("Collective name") or name))
        if collective == "other":
            collective = collective_of(name)
        group = str(arguments.get("Process Group Name", ""))
        called = str(arguments.get("Process Group Description") or self._groups.get(group, ""))
        words = f"{group} {called}".strip() if called not in ("", "undefined", "default_pg") else group
        ranks = self._members(arguments.get("Process Group Ranks"), group)
        traffic = Traffic(collective, words, stream_of(collective, called), ranks)
        return self._traffics.setdefault(traffic, len(self._traffics))

    def _members(self, text: Any, group: str) -> tuple[int, ...]:
        """`[0, 1]`; a long list is cut short with dots, and then the document's own list counts."""
        key = str(text), group
        if key not in self._ranks:
            ranks = [int(word) for word in re.findall(r"\d+", key[0])] if "..." not in key[0] else []
            for item in () if ranks else self._info.get("pg_config") or ():
                if str(item.get("pg_name")) == group and isinstance(item.get("ranks"), list):
                    ranks = item["ranks"]
            self._ranks[key] = tuple(ranks)
        return self._ranks[key]

    def _build(self, device: list[tuple[Any, ...]], host: list[tuple[Any, ...]], *, on_cpu: bool) -> Trace:
        zero = min((row[0] for row in (*device, *host)), default=0)
        columns = list(zip(*device, strict=True)) if device else [()] * 8
        start, end = _times(columns[0], columns[1], zero)
        launched = (np.array(columns[5], dtype=np.float64) - zero) * 1e-6
        of_device = Device(
            start,
            end,
            np.array(columns[2], dtype=np.int8),
            np.array(columns[3], dtype=np.int32),
            np.array(columns[4], dtype=np.int64).astype(np.int32),
            launched,
            np.array(columns[6], dtype=np.int32),
            np.array(columns[7], dtype=np.float64),
        )
        columns = list(zip(*host, strict=True)) if host else [()] * 5
        start, end = _times(columns[0], columns[1], zero)
        threads = np.array([_number(thread) for thread in columns[4]], dtype=np.int64)
        kinds, codes = np.array(columns[2], dtype=np.int8), np.array(columns[3], dtype=np.int32)
        of_host = Host(start, end, kinds, codes, threads)
        return Trace(
            source=self._source,
            rank=int(self._info.get("rank", 0)),
            world=self._info.get("world_size"),
            device=of_device,
            host=of_host,
            names=tuple(self._names),
            traffics=tuple(self._traffics),
            on_cpu=on_cpu,
            chip=self._chip,
            seconds=float(max(of_device.end.max(initial=0.0), of_host.end.max(initial=0.0))),
        )


def _times(stamps: Any, durations: Any, zero: float) -> tuple[Any, Any]:
    """Microseconds to seconds since `zero`, which is taken away first: stamps have 13 to 16 digits."""
    start = (np.array(stamps, dtype=np.float64) - zero) * 1e-6
    return start, start + np.array(durations, dtype=np.float64) * 1e-6


def _computes(name: str) -> bool:
    """Whether a CPU operator is work itself, and not autograd or c10d around it."""
    space, _, rest = name.partition("::")
    return (space in ("aten", "fsdp", "mkldnn", "quantized", "torchao") and bool(rest)) or "cpp_fused" in name


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1
