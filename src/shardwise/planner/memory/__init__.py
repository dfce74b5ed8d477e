"""The memory of any rank, by part, at the moment of its peak; and whether it fits."""

from shardwise.planner.memory.fit import VERDICTS, Verdict, capacity_bytes, verdict
from shardwise.planner.memory.predict import predict_memory, predict_moments

__all__ = ["VERDICTS", "Verdict", "capacity_bytes", "predict_memory", "predict_moments", "verdict"]
