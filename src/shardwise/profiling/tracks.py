"""A window of a Trace as a Timeline, which the planner's can be drawn beside."""

from __future__ import annotations

import numpy as np

from shardwise.profiling.kernels import short
from shardwise.profiling.names import INPUT
from shardwise.profiling.steps import Window
from shardwise.profiling.trace import COMMUNICATION, COPY, Trace
from shardwise.timeline import STREAMS, Timeline

_INPUT = STREAMS.index("input")


def timeline_of(trace: Trace, window: Window) -> Timeline:
    """Everything of the window, cut at its edges; `idle` where nothing else runs."""
    device, host = trace.device, trace.host
    streams = np.full(len(device.start), STREAMS.index("compute"), dtype=np.int8)
    streams[device.kind == COPY] = STREAMS.index("copy")
    of_traffic = np.array([STREAMS.index(traffic.stream) for traffic in trace.traffics] or [0], dtype=np.int8)
    communicating = device.kind == COMMUNICATION
    streams[communicating] = of_traffic[device.traffic[communicating]]
    waiting = trace.named(INPUT)
    stream = np.concatenate([streams, np.full(int(waiting.sum()), _INPUT, dtype=np.int8)])
    start = np.concatenate([device.start, host.start[waiting]])
    end = np.concatenate([device.end, host.end[waiting]])
    name = np.concatenate([device.name, host.name[waiting]]).astype(np.int32)
    inside = (start < window[1]) & (end > window[0])
    begin, finish = np.clip(start[inside], *window) - window[0], np.clip(end[inside], *window) - window[0]
    names = tuple(short(text) for text in trace.names)
    seconds = window[1] - window[0]
    return Timeline(stream[inside], begin, finish, name[inside], names, seconds, trace.rank).with_idle()
