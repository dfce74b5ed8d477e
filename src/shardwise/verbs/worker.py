"""One rank of `train`, whoever launched it: our launcher, torchrun or Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.evaluation.bands import load_bands
from shardwise.launching import FailureWatch, StopSignal
from shardwise.launching.worker import LAUNCHER, end
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.process import process_group
from shardwise.report.progress import ProgressLine
from shardwise.spec import Run
from shardwise.training.loop import TrainingError
from shardwise.verbs.job import prepare_job
from shardwise.verbs.session import Session


def train_rank(run: Run, out: Path, log: tuple[str, ...] = (), expect: Path | None = None) -> int:
    """Train as the rank that the environment names, and return this process's exit code.

    0 done, 1 done but a validation loss was not as `expect` says, 3 the last checkpoint could not be saved, 4 stopped
    early. For our launcher 1 becomes 0, since a crash of Python ends with 1, too: it looks at evaluations.jsonl itself.
    For torchrun, which takes every code but 0 for a failure, 4 becomes 0. A failure on any rank ends the process
    through FailureWatch.
    """
    job = prepare_job(run, out, int(os.environ["WORLD_SIZE"]))
    bands = load_bands(expect, job.run) if expect else None
    with StopSignal() as stop, process_group("cuda" if torch.cuda.is_available() else "cpu") as process:
        mesh = build_mesh(job.run.fixed_layout, process.device.type)
        store = dist.distributed_c10d._get_default_store()
        with (
            FailureWatch(store, process.rank, mesh.describe()),
            ProgressLine(job.run.recipe.total_steps, shown=process.rank == 0) as progress,
        ):
            session = Session(job, process, mesh, stop, progress, log, bands)
            code = _train(session, progress, stop)
    code = 0 if code == (1 if LAUNCHER in os.environ else 4) else code
    if log:
        end(code)  # now: what dashboards leave behind, such as exit hooks that wait for a network, may never return
    return code


def _train(session: Session, progress: ProgressLine, stop: StopSignal) -> int:
    recipe, trainer = session.job.run.recipe, session.trainer
    if session.done == session.total:
        progress.say(f"all {session.total} steps were trained already")
        if not session.evaluated():
            session.evaluate()
    try:
        for step in session.steps():
            session.record(step)
            last = step.step == session.total
            # Saving comes first: an evaluation that fails must not cost the steps before it.
            if last or trainer.stopping or _due(step.step, recipe.checkpoint.every):
                session.save(step)
            if (last or _due(step.step, recipe.evaluation.every)) and not trainer.stopping and not session.evaluate():
                session.save(step)
    except TrainingError as error:  # on every rank alike, so they can still close together
        session.close(str(error))
        raise
    saved, expected = session.close((stop.reason or "stopped") if trainer.stopping else "done")
    if not saved:
        return 3
    if trainer.stopping:
        progress.say(f"stopped after step {session.done} of {session.total}")
        return 4
    progress.say(f"done: {session.total} steps, results in {session.job.out}")
    return 0 if expected else 1


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
