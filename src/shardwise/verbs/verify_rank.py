"""One rank of `verify`: python -m shardwise.verbs.verify_rank WORK NAME [WEIGHTS]. Torch is imported late, so that it
can be stopped from its first line on."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.launching import FailureWatch, run_worker
from shardwise.launching.worker import end_when_stopped
from shardwise.spec import Run, load_run
from shardwise.spec.huggingface import CONFIG, model_config

if TYPE_CHECKING:
    from torch import Tensor

_TIMEOUT_SECONDS = 300  # that ranks wait for each other
REFERENCE = "one-process"


def main() -> int:
    """Train WORK/NAME.yaml. One process leaves its results in WORK; a layout compares its own with them."""
    work, name, *weights = sys.argv[1:]
    return run_worker(lambda: train(Path(work), name, Path(weights[0]) if weights else None))


def train(work: Path, name: str, weights: Path | None) -> int:
    """The rank that the environment names; 0, or the process ends through FailureWatch."""
    end_when_stopped()
    import torch
    import torch.distributed as dist

    from shardwise.parallel.mesh import build_mesh
    from shardwise.parallel.process import process_group
    from shardwise.training.parity import Trained, differences, train_few_steps

    _as_if_large()
    run = load_run(work / f"{name}.yaml")
    with process_group("cpu", _TIMEOUT_SECONDS) as process:
        mesh = build_mesh(run.fixed_layout, "cpu")
        store = dist.distributed_c10d._get_default_store()
        with FailureWatch(store, process.rank, mesh.describe()):
            trained = train_few_steps(run, process.device, _reader(weights, run) if weights else None)
            if name == REFERENCE:
                torch.save(vars(trained), work / "reference.pt")
                return 0
            reference = Trained(**torch.load(work / "reference.pt", mmap=True))
            found: list[dict[str, float]] = [{}] * process.world
            dist.all_gather_object(found, differences(trained, reference))
            if process.rank == 0:
                largest = {quantity: max(part[quantity] for part in found) for quantity in found[0]}
                finite = {quantity: value if math.isfinite(value) else None for quantity, value in largest.items()}
                (work / "differences.json").write_text(json.dumps(finite))
    return 0


def _as_if_large() -> None:
    """No tensor is too small to be offloaded, and parameters fill several buckets, as in the model that this one stands
    for."""
    from shardwise.parallel import offload
    from shardwise.training import offloaded_optimizer, sharded_optimizer

    offload.SMALLEST = 1
    offloaded_optimizer.BUCKET = sharded_optimizer.BUCKET = 5000


def _reader(weights: Path, run: Run) -> Callable[[str], Tensor]:
    """The weights of a checkpoint of ours, or of a directory of Hugging Face's, by our names."""
    if not (weights / CONFIG).is_file():
        from shardwise.checkpoints.stream import TensorReader

        reader = TensorReader(weights)
        return lambda name: reader.load(f"model.{name}")
    from shardwise.model.huggingface import NAMINGS, ImportedWeights
    from shardwise.model.weight_files import WeightFiles

    return ImportedWeights(run.model, NAMINGS[str(model_config(run.model)["model_type"])], WeightFiles(weights)).load


if __name__ == "__main__":
    sys.exit(main())
