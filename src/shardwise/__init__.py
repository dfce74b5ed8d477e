"""shardwise: pick the parallel layout of a pre-training run, train it, and measure what happened.

Each verb is a function here (`shardwise.train(…)`); importing the package imports neither torch nor a verb.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_VERBS = {
    "calibrate": "shardwise.verbs.calibrate",
    "check": "shardwise.verbs.check",
    "compare": "shardwise.verbs.compare",
    "doctor": "shardwise.verbs.doctor",
    "explain": "shardwise.verbs.explain",
    "export_checkpoint": "shardwise.verbs.checkpoint",
    "generate": "shardwise.verbs.generate",
    "import_checkpoint": "shardwise.verbs.checkpoint",
    "list_checkpoints": "shardwise.verbs.checkpoint",
    "plan": "shardwise.verbs.plan",
    "prepare_data": "shardwise.verbs.prepare_data",
    "profile": "shardwise.verbs.profile",
    "rehearse": "shardwise.verbs.rehearse",
    "train": "shardwise.verbs.train",
    "verify": "shardwise.verbs.verify",
    "verify_checkpoint": "shardwise.verbs.checkpoint",
    "whatif": "shardwise.verbs.compare",
}

__all__ = ["__version__", *_VERBS]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(importlib.import_module(_VERBS[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute '{name}'")
