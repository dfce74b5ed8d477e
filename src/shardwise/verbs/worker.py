"""One rank of `train`, whoever launched it: our launcher, torchrun or Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.launching import FailureWatch, StopSignal
from shardwise.launching.worker import LAUNCHER
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.process import process_group
from shardwise.report.progress import ProgressLine
from shardwise.spec import Run
from shardwise.verbs.job import prepare_job
from shardwise.verbs.session import Session


def train_rank(run: Run, out: Path, log: tuple[str, ...] = ()) -> int:
    """Train as the rank that the environment names, and return this process's exit code.

    0 done, 3 the last checkpoint could not be saved, 4 stopped early (0 under torchrun, which takes every other code
    for a failure). A failure on any rank ends the process through FailureWatch.
    """
    job = prepare_job(run, out, int(os.environ["WORLD_SIZE"]))
    with StopSignal() as stop, process_group("cuda" if torch.cuda.is_available() else "cpu") as process:
        mesh = build_mesh(job.run.fixed_layout, process.device.type)
        store = dist.distributed_c10d._get_default_store()
        with (
            FailureWatch(store, process.rank, mesh.describe()),
            ProgressLine(job.run.recipe.total_steps, shown=process.rank == 0) as progress,
        ):
            session = Session(job, process, mesh, stop, progress, log)
            code = _train(session, progress)
    return 0 if code == 4 and LAUNCHER not in os.environ else code


def _train(session: Session, progress: ProgressLine) -> int:
    recipe, trainer = session.job.run.recipe, session.trainer
    if session.done == session.total:
        progress.say(f"all {session.total} steps were trained already")
        if not session.evaluated():
            session.evaluate()
    for step in session.steps():
        session.record(step)
        last = step.step == session.total
        # Saving comes first: an evaluation that fails must not cost the steps before it.
        if last or trainer.stopping or _due(step.step, recipe.checkpoint.every):
            session.save(step)
        if (last or _due(step.step, recipe.evaluation.every)) and not trainer.stopping and not session.evaluate():
            session.save(step)
    if not session.close():
        return 3
    if trainer.stopping:
        progress.say(f"stopped after step {session.done} of {session.total}")
        return 4
    progress.say(f"done: {session.total} steps, results in {session.job.out}")
    return 0


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
