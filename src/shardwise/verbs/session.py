"""Session: one rank's training run, put together from the rooms."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from shardwise.checkpoints.manifest import list_checkpoints
from shardwise.checkpoints.restore import find, restore
from shardwise.checkpoints.save import Checkpointer
from shardwise.checkpoints.state import apply, collect
from shardwise.evaluation.bands import Bands
from shardwise.evaluation.validation import validate
from shardwise.launching import StopSignal
from shardwise.parallel.apply import build_parallel
from shardwise.parallel.mesh import Mesh, mesh_table
from shardwise.parallel.process import Process
from shardwise.planner.parameters import count_parameters
from shardwise.report.progress import ProgressLine
from shardwise.spec import InputError, Step
from shardwise.spec.numbers import human
from shardwise.spec.presets import gpu_called
from shardwise.training.batches import Batches
from shardwise.training.loop import Trainer
from shardwise.verbs.beside import PREDICTIONS, append, in_words, line_of, median_step, predicted
from shardwise.verbs.job import Job, store_run
from shardwise.verbs.records import Records


class Session:
    """Builds or restores the model, then trains, records, saves and evaluates it. Every method is collective."""

    def __init__(
        self,
        job: Job,
        process: Process,
        mesh: Mesh,
        stop: StopSignal,
        progress: ProgressLine,
        log: tuple[str, ...],
        bands: Bands | None,
    ):
        began = time.perf_counter()
        run, recipe = job.run, job.run.recipe
        self.job, self._process, self._mesh, self._stop, self._progress = job, process, mesh, stop, progress
        self._bands = bands
        self.total = recipe.total_steps
        self._first = process.rank == 0
        if recipe.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(recipe.seed + process.rank)
        progress.say(self._describe())
        self._module = build_parallel(run, mesh, process.device)
        self.trainer = Trainer(run, self._module, lambda: stop.requested)
        self._checkpointer = Checkpointer(
            job.checkpoints,
            keep=recipe.checkpoint.keep,
            asynchronous=recipe.checkpoint.asynchronous,
            say=progress.say,
        )
        self.done = self._restore()  # completed steps
        self._seconds: list[float] = []
        self._peak_gib: float | None = None
        if self._first:
            store_run(job)
        where = {"world": process.world, "device": self._device(), "layout": run.fixed_layout.describe()}
        self._records = Records(
            job.out, self.done, time.perf_counter() - began, where, log, progress.say, active=self._first
        )

    def steps(self) -> Iterator[Step]:
        """The Steps that are left."""
        run, data = self.job.run, self.job.data
        order = data.order(run.recipe.sequence, run.recipe.batch_sequences, run.recipe.seed)
        batches = Batches(
            data.train, order, run.fixed_layout, self._mesh.data_rank, run.model.vocabulary, self._process.device
        )
        try:
            yield from self.trainer.steps(batches, order, self.done)
        finally:
            batches.close()

    def record(self, step: Step) -> None:
        """Write the step down and show it."""
        self._records.step(step.dump())
        self._seconds.append(step.step_seconds)
        self._peak_gib = step.peak_memory_gib
        self._progress.step(step, first=step.step == self.done + 1)
        self.done = step.step

    def save(self, step: Step) -> None:
        """Commit a checkpoint of the state after `step`; in the background, unless the Run says otherwise."""
        began = time.perf_counter()
        self._checkpointer.save(
            step.step,
            collect(self._module, self.trainer.optimizer) | self.trainer.loss_scale.state(),
            tokens=step.tokens,
            run=self.job.run.dump(),
            data=self.job.data.fingerprint,
        )
        self._records.event("save", step.step, time.perf_counter() - began)

    def evaluate(self) -> bool:
        """Validate after the step that is done. False where a stop came first; then the loop ends, too."""
        run = self.job.run
        if run.recipe.evaluation.tokens == 0 or self.job.data.validation.tokens < 2:
            return True
        began = time.perf_counter()
        result = validate(
            self._module,
            self.trainer.losses,
            self.job.data,
            step=self.done,
            sequence=run.recipe.sequence,
            tokens=run.recipe.evaluation.tokens,
            micro_batch=run.fixed_layout.micro_batch,
            data_rank=self._mesh.data_rank,
            data_ranks=run.fixed_layout.data_ranks,
            counts=self._mesh.counts_targets,
            vocabulary=run.model.vocabulary,
            device=self._process.device,
            wants_stop=lambda: self._stop.requested,
        )
        if result is None:
            self.trainer.stopping = True
            return False
        self._records.event("evaluation", result.step, time.perf_counter() - began)
        self._progress.say(
            f"step {result.step}/{self.total}  validation loss {result.loss:.4f}  "
            f"{result.bits_text} bits per byte  ({human(result.tokens)} tokens)"
        )
        verdict = self._bands and self._bands.check(result.step * self._batch_tokens, result.loss)
        if verdict:
            self._progress.say(verdict.describe())
        self._records.evaluation(result.dump() | (verdict.dump() if verdict else {}))
        return True

    def evaluated(self) -> bool:
        """Whether the last step of the run has its validation already (a stop may have come between)."""
        path = self.job.out / "evaluations.jsonl"
        found = [path.exists() and f'"step": {self.total},' in path.read_text()] if self._first else [None]
        dist.broadcast_object_list(found, device=self._process.device)
        return bool(found[0])

    def close(self, reason: str) -> tuple[bool, bool]:
        """Wait for what is under way, and write the report. `reason` says why the session ends: 'done', 'SIGTERM', ….

        Returns whether the last checkpoint was saved, and whether every validation loss was as expected.
        """
        began = time.perf_counter()
        self._say_beside()
        self._checkpointer.close()
        error = self._checkpointer.last_error
        self._records.event("stop", self.done, time.perf_counter() - began, reason=error or reason)
        expected = [self._records.close(self._bands, self._batch_tokens)]
        dist.broadcast_object_list(expected, device=self._process.device)  # only rank 0 has the whole run's
        return error is None, expected[0]

    def _say_beside(self) -> None:
        """What was predicted of this Run beside what was measured, on rank 0."""
        seconds = median_step(self._seconds)
        if not self._first or seconds is None:
            return
        run, chip = self.job.run, gpu_called(self._device())
        if chip and self._device() not in run.cluster.gpu.device_names:  # the Run was written for another
            run = run.replace(cluster=run.cluster.model_copy(update={"gpu": chip}))
        found, _ = predicted(run)
        # A CPU's figure is the whole process's memory, which nobody predicts; rank 0's stage may not be the fullest.
        live = self._peak_gib if self._process.device.type == "cuda" and run.fixed_layout.pp == 1 else None
        line = line_of("train", run, found, step_seconds=seconds, live_gib=live)
        try:
            append(self.job.out, line)
        except OSError as error:
            self._progress.say(f"{self.job.out / PREDICTIONS}: {error.strerror}")
        if text := in_words(line):
            self._progress.say(text)

    def _restore(self) -> int:
        """Load the newest complete checkpoint onto this layout, if there is one; returns its step."""
        entry = find(self.job.checkpoints, say=self._progress.say)
        if entry is None:
            if any(found.checkpoint for found in list_checkpoints(self.job.checkpoints)):
                raise InputError(
                    f"{self.job.checkpoints}: every checkpoint is damaged; restore one from a copy, or use another "
                    "--out"
                )
            return 0
        state = collect(self._module, self.trainer.optimizer) | self.trainer.loss_scale.state()
        if entry.step == 0:  # imported: weights only, in fp32
            restore(entry.path, {"model": state["model"]}, cast=True)
            self._progress.say(f"starting from the weights in {entry.path}")
            return 0
        restore(entry.path, state)
        apply(self._module, self.trainer.optimizer, state)
        self.trainer.loss_scale.load(state)
        self._progress.say(f"continuing after step {entry.step} from {entry.path}")
        return entry.step

    @property
    def _batch_tokens(self) -> int:
        return self.job.run.recipe.batch_sequences * self.job.run.recipe.sequence

    def _device(self) -> str:
        return torch.cuda.get_device_name(self._process.device) if self._process.device.type == "cuda" else "CPU"

    def _describe(self) -> str:
        run, data = self.job.run, self.job.data
        machine = f"{self._process.world} × {self._device()}"
        return (
            f"{run.to_yaml(whole=False)}"
            f"{run.model.name}: {count_parameters(run.model).total:,} parameters on {machine}, "
            f"{run.fixed_layout.describe()}\n{mesh_table(run.fixed_layout)}\n"
            f"data: {human(data.train.tokens)} training tokens, {human(data.validation.tokens)} validation tokens; "
            f"{self.total} steps of {human(self._batch_tokens)} tokens "
            f"into {self.job.out}"
        )
