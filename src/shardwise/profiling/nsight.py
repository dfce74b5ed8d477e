"""An sqlite export of Nsight Systems: `nsys export --type sqlite`. A process's device is a rank.

Tables and columns: "SQLite schema reference" of Nsight Systems' user guide. Times are in nanoseconds; the upper bits of
a globalTid are those of its globalPid.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from shardwise.profiling.names import WAITS, collective_of, kernel_kind, stream_of
from shardwise.profiling.trace import ANNOTATION, CALL, COMMUNICATION, COPY, MEMORY, WAIT, Device, Host, Trace, Traffic
from shardwise.spec import InputError

_KERNELS, _RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_DIRECTIONS = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
_PROCESS = ~0xFFFFFF  # of a globalTid

Row = tuple[int, int, int, int, str, int]  # start, end, stream, correlation, name, kind


def read_nsight(path: Path) -> list[Trace]:
    """Every rank, numbered by device and process. Raises InputError where no kernel was traced."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
            return _Reader(base, str(path)).traces()
    except sqlite3.Error as error:
        raise InputError(f"--trace {path}: not an export of Nsight Systems that can be read: {error}") from None


class _Reader:
    def __init__(self, base: sqlite3.Connection, source: str):
        self._base, self._source = base, source
        self._tables = {
            name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type IN ('table','view')")
        }
        if _KERNELS not in self._tables:
            raise InputError(f"--trace {source}: no kernels in it: profile with `nsys profile --trace=cuda,nvtx`")
        self._texts = dict(base.execute("SELECT id, value FROM StringIds")) if "StringIds" in self._tables else {}

    def traces(self) -> list[Trace]:
        owners: dict[tuple[int, int], list[Row]] = {}
        for owner, row in self._device_rows():
            owners.setdefault(owner, []).append(row)
        ordered = sorted(owners, key=lambda owner: (owner[1], owner[0]))
        return [
            self._trace(rank, owner, owners[owner], len(ordered)) for rank, owner in enumerate(ordered) if owners[owner]
        ]

    def _device_rows(self) -> Iterator[tuple[tuple[int, int], Row]]:
        process = self._process_of(_KERNELS)
        for start, end, stream, correlation, name, device, owner in self._base.execute(
            f"SELECT start, end, streamId, correlationId, demangledName, deviceId, {process} FROM {_KERNELS}"
        ):
            text = self._texts.get(name, str(name))
            yield (owner or 0, device), (start, end, stream, correlation, text, kernel_kind(text))
        for table, direction in (("CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind"), ("CUPTI_ACTIVITY_KIND_MEMSET", "0")):
            if table not in self._tables:
                continue
            for start, end, stream, correlation, kind, device, owner in self._base.execute(
                f"SELECT start, end, streamId, correlationId, {direction}, deviceId, {self._process_of(table)} "
                f"FROM {table}"
            ):
                text = _DIRECTIONS.get(kind, "Memset" if kind == 0 else f"Memcpy kind {kind}")
                yield (
                    (owner or 0, device),
                    (start, end, stream, correlation, text, COPY if kind in (1, 2, 10) else MEMORY),
                )

    def _process_of(self, table: str) -> str:
        columns = {row[1] for row in self._base.execute(f"PRAGMA table_info({table})")}
        return "globalPid" if "globalPid" in columns else "0"

    def _host_rows(self, owner: int) -> tuple[list[tuple[int, int, int, str, int]], dict[int, int]]:
        """Calls and annotations of a process: start, end, kind, name, thread; and when each correlation was called."""
        rows, calls = [], {}
        if _RUNTIME in self._tables:
            for start, end, thread, correlation, name in self._base.execute(
                f"SELECT start, end, globalTid, correlationId, nameId FROM {_RUNTIME}"
            ):
                if owner and thread & _PROCESS != owner & _PROCESS:
                    continue
                text = self._texts.get(name, str(name))
                rows.append((start, end, WAIT if WAITS.search(text) else CALL, text, thread))
                calls[correlation] = start
        if "NVTX_EVENTS" in self._tables:
            for start, end, text, code, thread in self._base.execute(
                "SELECT start, end, text, textId, globalTid FROM NVTX_EVENTS WHERE end IS NOT NULL"
            ):
                if owner and thread is not None and thread & _PROCESS != owner & _PROCESS:
                    continue
                rows.append((start, end, ANNOTATION, text or self._texts.get(code, ""), thread or 0))
        return rows, calls

    def _trace(self, rank: int, owner: tuple[int, int], rows: list[Row], world: int) -> Trace:
        host, calls = self._host_rows(owner[0])
        zero = min([row[0] for row in rows] + [row[0] for row in host])
        names: dict[str, int] = {}
        traffics: dict[Traffic, int] = {}

        def seconds(stamps: list[int]) -> np.ndarray:
            return (np.array(stamps, dtype=np.int64) - zero) * 1e-9

        def traffic(row: Row) -> int:
            if row[5] != COMMUNICATION:
                return -1
            collective = collective_of(row[4])
            return traffics.setdefault(Traffic(collective, "", stream_of(collective, "")), len(traffics))

        device = Device(
            seconds([row[0] for row in rows]),
            seconds([row[1] for row in rows]),
            np.array([row[5] for row in rows], dtype=np.int8),
            np.array([names.setdefault(row[4], len(names)) for row in rows], dtype=np.int32),
            np.array([row[2] for row in rows], dtype=np.int32),
            np.array([(calls[row[3]] - zero) * 1e-9 if row[3] in calls else np.nan for row in rows]),
            np.array([traffic(row) for row in rows], dtype=np.int32),
            np.full(len(rows), np.nan),
        )
        of_host = Host(
            seconds([row[0] for row in host]),
            seconds([row[1] for row in host]),
            np.array([row[2] for row in host], dtype=np.int8),
            np.array([names.setdefault(row[3], len(names)) for row in host], dtype=np.int32),
            np.array([row[4] for row in host], dtype=np.int64),
        )
        last = float(max(device.end.max(initial=0.0), of_host.end.max(initial=0.0)))
        return Trace(
            self._source, rank, world if world > 1 else None, device, of_host, tuple(names), tuple(traffics),
            on_cpu=False, chip=self._chip(owner[1]), seconds=last,
        )  # fmt: skip

    def _chip(self, device: int) -> str | None:
        if "TARGET_INFO_GPU" not in self._tables:
            return None
        row = self._base.execute("SELECT name FROM TARGET_INFO_GPU WHERE id = ?", (device,)).fetchone()
        return str(row[0]) if row else None
