"""`calibrate`: what this machine reaches, as a Cluster file that `plan` takes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

from shardwise.launching.local import launch
from shardwise.spec import Cluster, InputError
from shardwise.verbs.unfinished import Unfinished

WORKER = (sys.executable, "-m", "shardwise.verbs.calibrate_rank")


def calibrate(*, nproc: int = 1, quick: bool = False, say: Callable[[str], None] = print) -> Cluster:
    """Measure this machine's products, attention, memory-bound ops, copies and host; with several ranks the links
    between them too. Each rank is a GPU, or where there is none a CPU process.

    quick: fewer sizes and repeats. Progress lines go to standard error. Raises InputError, and Unfinished where a rank
    failed or the user stopped it. Main thread only.
    """
    if nproc < 1:
        raise InputError(f"--nproc {nproc}: at least 1 rank is needed")
    _require_devices(nproc)
    command = f"shardwise calibrate --nproc {nproc}" + " --quick" * quick
    with tempfile.TemporaryDirectory(prefix="shardwise-calibrate-") as directory:
        file = Path(directory) / "cluster.json"
        words = [*WORKER, str(file), command, *(["--quick"] if quick else [])]
        code = launch(words, nproc, say=say, how_to_continue="stopped before there was a result")
        if code:
            raise Unfinished("calibrate", code)
        return Cluster.load(json.loads(file.read_text()), "cluster")


def cluster_yaml(cluster: Cluster) -> str:
    """The Cluster file."""
    text: str = yaml.dump(cluster.dump(), sort_keys=False, default_flow_style=None, width=110)
    return text


def _require_devices(nproc: int) -> None:
    import torch

    devices = torch.cuda.device_count()
    if devices and nproc > devices:
        raise InputError(f"--nproc {nproc}: this machine has {devices} GPU(s); nearest: {devices}")
