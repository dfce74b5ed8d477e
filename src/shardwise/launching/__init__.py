"""Start the ranks of one machine, stop them cleanly, and end them all when one fails. No torch."""

from shardwise.launching.failure import FailureWatch
from shardwise.launching.local import launch
from shardwise.launching.stop import STOP_SIGNALS, StopSignal, hold_stop_signals, stop_signals_held
from shardwise.launching.worker import run_worker

__all__ = [
    "STOP_SIGNALS",
    "FailureWatch",
    "StopSignal",
    "hold_stop_signals",
    "launch",
    "run_worker",
    "stop_signals_held",
]
