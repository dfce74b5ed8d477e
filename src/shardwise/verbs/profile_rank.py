"""One rank of `profile`: python -m shardwise.verbs.profile_rank RUN.yaml DIRECTORY STEPS. Torch is imported late, so
that it can be stopped from its first line on."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.launching import FailureWatch, run_worker
from shardwise.launching.worker import end_when_stopped
from shardwise.spec import load_run

WARM_UP = 2  # steps, before the first is timed
INPUT = "shardwise: input"
STEPS_FILE = "steps.json"


def trace_name(rank: int) -> str:
    return f"trace-rank{rank}.json.gz"


def main() -> int:
    run, directory, steps = sys.argv[1:]
    return run_worker(lambda: profile_rank(Path(run), Path(directory), int(steps)))


def profile_rank(path: Path, directory: Path, steps: int) -> int:
    """Train 2 steps to warm up, `steps` that are timed, and as many again that are traced. Each rank leaves its trace
    in `directory`; rank 0 the Steps, and what was compiled after the warm-up."""
    end_when_stopped()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of every start and stop
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    from shardwise.parallel.apply import build_parallel
    from shardwise.parallel.compat import compilations
    from shardwise.parallel.mesh import build_mesh
    from shardwise.parallel.process import process_group
    from shardwise.training.loop import Trainer

    run = load_run(path)
    plain = WARM_UP + steps
    with process_group("cuda" if torch.cuda.is_available() else "cpu") as process:
        mesh = build_mesh(run.fixed_layout, process.device.type)
        with FailureWatch(dist.distributed_c10d._get_default_store(), process.rank, mesh.describe()):
            torch.manual_seed(run.recipe.seed + process.rank)
            trainer = Trainer(run, build_parallel(run, mesh, process.device), lambda: False)
            batches, order = _batches(run, mesh, process.device)
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (process.device.type == "cuda")
            timed, warm = [], 0.0
            with profile(
                activities=activities,
                schedule=schedule(wait=plain, warmup=1, active=steps, repeat=1),
                record_shapes=True,
                acc_events=True,
            ) as profiler:
                for step in islice(trainer.steps(batches, order, 0), plain + 1 + steps):
                    profiler.step()
                    if step.step == WARM_UP:
                        warm = time.time()
                    elif WARM_UP < step.step <= plain:
                        timed.append(asdict(step))
            batches.close()
            profiler.export_chrome_trace(str(directory / trace_name(process.rank)))
            if process.rank == 0:
                later = [item for item in compilations() if item[2] >= warm]
                (directory / STEPS_FILE).write_text(json.dumps({"steps": timed, "compilations": later}))
            dist.barrier()
    return 0


def _batches(run: Any, mesh: Any, device: Any) -> tuple[Any, Any]:
    """The trainer's own reader, with an annotation around the wait for it."""
    from torch.profiler import record_function

    from shardwise.data import open_data, resolve_data
    from shardwise.training.batches import Batches

    class Annotated(Batches):
        def take(self, index: int) -> Any:
            with record_function(INPUT):
                return super().take(index)

    data = open_data(resolve_data(run.recipe.data))
    order = data.order(run.recipe.sequence, run.recipe.batch_sequences, run.recipe.seed)
    return Annotated(data.train, order, run.fixed_layout, mesh.data_rank, run.model.vocabulary, device), order


if __name__ == "__main__":
    sys.exit(main())
