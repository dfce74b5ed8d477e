"""`train`: launch a Run on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from shardwise.evaluation.bands import load_bands, summarize
from shardwise.launching.local import launch
from shardwise.report.loggers import require_loggers
from shardwise.spec import InputError, Run, load_run
from shardwise.verbs.job import prepare_job, store_run


def train(
    run: Run | str | Path,
    *,
    out: str | Path,
    nproc: int | None = None,
    log: tuple[str, ...] = (),
    expect: str | Path | None = None,
    say: Callable[[str], None] = print,
    how_to_continue: str | None = None,
) -> int:
    """Train a Run on `nproc` local ranks, or continue it where `out` already holds a part of it.

    nproc defaults to what the Run asks for. Writes run.yaml, metrics.jsonl, evaluations.jsonl, events.jsonl,
    report.html and checkpoints/ into `out`. `log` names dashboards to feed as well ('tensorboard', 'wandb',
    'trackio'); `expect` is a file of bands that validation losses are compared with (docs/report.md).

    Returns the exit code: 0 done, 1 done but a validation loss was outside its band, 3 it broke, 4 stopped early, the
    same call continues. Raises InputError.
    """
    require_loggers(log)
    run = run if isinstance(run, Run) else load_run(run)
    ranks = nproc if nproc is not None else _ranks_asked_for(run)
    if ranks < 1:
        raise InputError(f"--nproc {ranks}: at least 1 rank is needed")
    job = prepare_job(run, Path(out), ranks)
    if expect is not None:
        load_bands(expect, job.run)
    store_run(job)
    command = [sys.executable, "-m", "shardwise", "train", str(job.out / "run.yaml"), "--out", str(out)]
    command += [word for name in log for word in ("--log", name)]
    command += [] if expect is None else ["--expect", str(expect)]
    code = launch(command, ranks, say=say, how_to_continue=how_to_continue or shlex.join(["shardwise", *command[3:]]))
    if code == 0 and expect is not None and not summarize(job.out / "evaluations.jsonl")[0]:
        return 1
    return code


def _ranks_asked_for(run: Run) -> int:
    ranks = run.cluster.gpus if isinstance(run.layout, str) else run.layout.world
    if ranks > run.cluster.gpus_per_node:
        raise InputError(
            f"this Run needs {ranks} ranks, more than the {run.cluster.gpus_per_node} of one node: start it on every "
            f"node with torchrun (docs/launching.md), or give --nproc"
        )
    return ranks
