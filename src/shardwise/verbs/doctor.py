"""`doctor`: where a run's missing speed or memory most probably is, and what to try, with predicted effects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.planner.flops import model_flops_per_token
from shardwise.planner.memory import capacity_bytes
from shardwise.planner.neighbours import Neighbour, neighbours
from shardwise.planner.search import Found, search
from shardwise.planner.stacks import own_stack
from shardwise.profiling.missing import Loss, Mishap, account, mishaps
from shardwise.profiling.oom import OutOfMemory, parse_oom
from shardwise.profiling.remedies import as_remedy
from shardwise.profiling.snapshot import Snapshot, load_snapshot
from shardwise.profiling.tensors import likely_tensors
from shardwise.spec import InputError, Layout, Run, load_run
from shardwise.spec.diagnosis import Remedy
from shardwise.spec.memory import GIB, OUTSIDE, PARTS, Memory
from shardwise.verbs.predicted import predict_run

_TRIED = 4  # remedies that are named
_WORTH = 0.005  # share of the step from which a gain is named
_EXPLAINED = 0.9  # of the predicted speed: the rest is the model's own error
_AHEAD = 1.02  # a best layout that is faster than this is named


@dataclass(frozen=True)
class Speed:
    """Tokens per second and GPU, and MFU: as measured, as predicted of this layout, and of the planner's first choice.

    losses: seconds of the measured step; mishaps: what would explain a speed below the prediction.
    """

    measured: float
    mfu: float
    predicted: float
    predicted_mfu: float
    best: float
    best_layout: Layout
    step_seconds: float
    losses: tuple[Loss, ...]
    mishaps: tuple[Mishap, ...]

    @property
    def explained(self) -> bool:
        """Whether the run is about as fast as the model says."""
        return self.measured >= _EXPLAINED * self.predicted


@dataclass(frozen=True)
class Consultation:
    """The answer. `memory` is the prediction for the fullest rank, `findings` what the message or the snapshot says."""

    run: Run | None
    speed: Speed | None = None
    memory: Memory | None = None
    oom: OutOfMemory | None = None
    snapshot: Snapshot | None = None
    findings: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()

    def dump(self) -> dict[str, Any]:
        """Plain types; `null` where something is unknown."""
        speed = asdict(self.speed) if self.speed else None
        if speed and self.speed:
            speed["best_layout"] = self.speed.best_layout.dump()
            speed["losses"] = [
                {"what": loss.what, "seconds": loss.seconds, "class": loss.class_} for loss in self.speed.losses
            ]
        return {
            "layout": self.run.fixed_layout.dump() if self.run else None,
            "speed": speed,
            "memory": self.memory.dump() if self.memory else None,
            "oom": _in_gib(asdict(self.oom)) if self.oom else None,
            "snapshot": _in_gib(asdict(self.snapshot)) if self.snapshot else None,
            "findings": list(self.findings),
            "remedies": [item.model_dump(mode="json", by_alias=True) for item in self.remedies],
            "notes": list(self.notes),
        }


def doctor(
    run: Run | dict[str, Any] | None = None,
    *,
    tokens_per_second_per_gpu: float | None = None,
    oom: str | Path | None = None,
    snapshot: str | Path | None = None,
) -> Consultation:
    """Compare what was measured with what the planner predicts for the Run's layout and for the best one.

    oom: a log with PyTorch's message. snapshot: a file of torch.cuda.memory._dump_snapshot(). Both also without a Run;
    then nothing is predicted. Raises InputError.
    """
    if (tokens_per_second_per_gpu, oom, snapshot).count(None) != 2:
        raise InputError("give one of --tokens-per-second-per-gpu, --oom and --snapshot")
    if run is not None:
        run = run if isinstance(run, Run) else load_run(run)
    if tokens_per_second_per_gpu is not None:
        if run is None:
            raise InputError("--tokens-per-second-per-gpu: a MODEL, --gpu and --gpus are needed to compare it with")
        return _slow(run, tokens_per_second_per_gpu)
    if oom is not None:
        return _out_of_memory(run, Path(oom))
    assert snapshot is not None
    return _snapshot(run, Path(snapshot))


def _slow(run: Run, measured: float) -> Consultation:
    if measured <= 0:
        raise InputError(f"--tokens-per-second-per-gpu {measured:g}: must be more than 0")
    run, found, candidate, notes = predict_run(run)
    best = search(run.model, run.cluster, run.recipe, own_stack(run.cluster.gpu), top=1).found[0]
    chips = run.cluster.gpus
    peak = run.cluster.gpu.peak_flops(found.subject.dtype)
    assert peak is not None  # else there would be no prediction
    mfu = measured * model_flops_per_token(run.model, run.recipe.sequence) / peak
    if mfu > 1:
        raise InputError(
            f"--tokens-per-second-per-gpu {measured:,.0f}: that is an MFU of {mfu:.0%}; is it the speed of all "
            f"{chips} GPUs together? One GPU would then do {measured / chips:,.0f}"
        )
    total = measured * chips
    speed = Speed(
        measured,
        mfu,
        found.tokens_per_second / chips,
        candidate.time.mfu,
        best.tokens_per_second / chips,
        best.layout,
        found.tokens_per_second * found.step.seconds / total,
        tuple(account(found, total)),
        tuple(mishaps(found, total)) if measured < _EXPLAINED * found.tokens_per_second / chips else (),
    )
    findings, fixes = tuple(_compared(speed)), tuple(_faster(run, found, best, explained=speed.explained))
    return Consultation(run, speed, found.memory, findings=findings, remedies=fixes, notes=notes)


def _compared(speed: Speed) -> Iterable[str]:
    ratio = speed.measured / speed.predicted
    if speed.explained:
        yield f"the run is as fast as its layout allows, by the model ({ratio:.0%} of the prediction)"
    else:
        yield f"the run reaches {ratio:.0%} of what this layout should: something outside the layout is wrong"
    if speed.best > speed.predicted * _AHEAD:
        yield f"the best layout would be {speed.best / speed.predicted:.2f} times as fast as this one, by the model"
    else:
        yield "no other layout would be faster, by the model"


def _faster(run: Run, found: Found, best: Found, *, explained: bool) -> Iterable[Remedy]:
    if not explained:
        why = "tells which of these it is; a faster layout helps only afterwards"
        yield Remedy(change="trace a few steps and run `shardwise profile --trace FILE`", why=why)
    gain = 1 - found.tokens_per_second / best.tokens_per_second
    near = [
        item for item in neighbours(found, run.recipe) if (item.step_change or 0.0) < -_WORTH and item.verdict != "oom"
    ]
    yield from (as_remedy(item) for item in near[: _TRIED - 1])
    if gain > _WORTH:
        yield Remedy(
            change=f"layout: the planner's first choice ({best.layout.describe()})",
            layout=best.layout,
            gain_percent=100 * gain,
            memory_gib=(best.memory.live - found.memory.live) / GIB,
            class_="modelled",
        )


def _out_of_memory(run: Run | None, path: Path) -> Consultation:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        raise InputError(f"--oom {path}: no such file") from None
    except OSError as error:
        raise InputError(f"--oom {path}: cannot be read: {error.strerror or error}") from None
    message = parse_oom(text, str(path))
    findings = list(_of_message(message))
    if run is None:
        return Consultation(None, oom=message, findings=tuple(findings), remedies=tuple(_settings(message)))
    run, found, _, notes = predict_run(run)
    tensors = likely_tensors(found.subject, message.tried)
    if tensors:
        findings.append(f"{_gib(message.tried)} is the size of {tensors[0]}")
    if message.allocated is not None:
        findings.append(_against_prediction(message.allocated + message.tried, found.memory))
    # Broken up memory is put right by a setting; else so much must go.
    needed = 0.0 if message.fragmented else message.short
    settings, leaner = list(_settings(message)), _leaner(run, found, needed)
    # Where the planner sees no room at all, no setting of the allocator makes it.
    fixes = [*leaner[: _TRIED - 1], *settings] if found.verdict == "oom" else [*settings, *leaner]
    return Consultation(
        run, memory=found.memory, oom=message, findings=tuple(findings), remedies=tuple(fixes[:_TRIED]), notes=notes
    )


def _of_message(message: OutOfMemory) -> Iterable[str]:
    if message.count > 1:
        yield f"{message.count} such messages; the first counts, since the others may follow from it"
    yield f"it asked for {_gib(message.tried)}" + (
        f", and {_gib(message.free)} of {_gib(message.total)} were free"
        if message.free is not None and message.total is not None
        else ""
    )
    if message.fragmented:
        yield (
            f"fragmentation: {_gib(message.unallocated or 0)} are reserved and in no tensor, more than was asked for, "
            "but in pieces that are too small"
        )
    elif message.unallocated is not None:
        yield f"no fragmentation: only {_gib(message.unallocated)} are reserved and in no tensor"
    if message.allocated is not None:
        yield f"tensors hold {_gib(message.allocated)}"
    if message.outside is not None and message.outside > 0.25 * GIB:
        yield f"{_gib(message.outside)} of this process are not the allocator's: CUDA context, kernels, NCCL"
    if message.others is not None and message.others > 0.5 * GIB:
        yield f"{_gib(message.others)} belong to other processes or the driver: see nvidia-smi"
    if message.pools:
        yield f"{_gib(message.pools)} lie in private pools of CUDA graphs"


def _settings(message: OutOfMemory) -> Iterable[Remedy]:
    if message.others is not None and message.others > max(2 * GIB, message.tried):
        yield Remedy(change="end the other processes on this GPU", why=f"they hold {_gib(message.others)}")
    if message.fragmented or (message.unallocated or 0) > 0.1 * (message.reserved or float("inf")):
        yield Remedy(
            change="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            memory_gib=-(message.unallocated or 0) / GIB,
            class_="upper bound",
            why="segments that grow leave hardly any holes; costs no speed (shardwise sets it)",
        )


def _against_prediction(live: float, memory: Memory) -> str:
    text = f"{_gib(live)} in tensors were wanted; the planner expects {_gib(memory.live)} at the peak"
    if live > 1.15 * memory.live:
        return f"{text}: {_gib(live - memory.live)} more than this layout needs (another batch, sequence or setting?)"
    if live > 0.85 * memory.live:
        return f"{text}, so this is about the peak of such a run"
    return f"{text}, so it fails before the peak"


def _leaner(run: Run, found: Found, needed: float) -> list[Remedy]:
    """Neighbours that need less, by at least `needed` bytes where any do; the fastest first."""
    able = [item for item in neighbours(found, run.recipe) if item.memory_change is not None and item.memory_change < 0]
    enough = [item for item in able if -(item.memory_change or 0.0) >= needed and item.verdict != "oom"]
    return [as_remedy(item) for item in enough] or [as_remedy(item) for item in sorted(able, key=_memory_change)]


def _memory_change(item: Neighbour) -> float:
    return item.memory_change or 0.0


def _snapshot(run: Run | None, path: Path) -> Consultation:
    taken = load_snapshot(path)
    findings = [
        f"{_gib(taken.allocated)} in tensors, {_gib(taken.reserved)} reserved in {taken.segments} segments: "
        f"{_gib(taken.unallocated)} in no tensor, the largest piece of it {_gib(taken.largest_free)}"
    ]
    if taken.fragmented:
        findings.append("fragmentation: most of what is free lies in small pieces")
    if taken.peak is not None:
        findings.append(f"the recorded history peaked at {_gib(taken.peak)} in tensors")
    fixes: list[Remedy] = []
    if taken.fragmented:
        fixes.append(
            Remedy(
                change="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                memory_gib=-taken.unallocated / GIB,
                class_="upper bound",
                why="segments that grow leave hardly any holes",
            )
        )
    if taken.tried is not None:
        findings.append(f"an allocation of {_gib(taken.tried)} failed")
    if run is None:
        return Consultation(None, snapshot=taken, findings=tuple(findings), remedies=tuple(fixes))
    run, found, _, notes = predict_run(run)
    if taken.tried is not None and (tensors := likely_tensors(found.subject, taken.tried)):
        findings.append(f"that is the size of {tensors[0]}")
    findings.append(_against_prediction(max(taken.peak or 0.0, taken.allocated + (taken.tried or 0.0)), found.memory))
    capacity = capacity_bytes(run.cluster.gpu)
    needed = max(0.0, taken.reserved - capacity) if capacity else 0.0
    fixes += _leaner(run, found, max(needed, taken.tried or 0.0))
    return Consultation(
        run, memory=found.memory, snapshot=taken, findings=tuple(findings), remedies=tuple(fixes[:_TRIED]), notes=notes
    )


def fullest_parts(memory: Memory) -> list[tuple[str, float]]:
    """Parts of the predicted memory, the largest first."""
    sizes = [(part, getattr(memory, part)) for part in (*PARTS, *OUTSIDE)]
    return sorted((item for item in sizes if item[1] > 0), key=lambda item: -item[1])


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


_SIZES = ("tried", "total", "free", "in_use", "allocated", "reserved", "pools", "largest_free", "peak", "size")


def _in_gib(data: Any) -> Any:
    """Sizes in GiB, with the unit in the name."""
    if isinstance(data, dict):
        renamed = {f"{key}_gib" if key in _SIZES else key: value for key, value in data.items()}
        if isinstance(data.get("parts"), dict):
            renamed["parts_gib"] = {part: size / GIB for part, size in renamed.pop("parts").items()}
        return {
            key: value / GIB if key.endswith("_gib") and isinstance(value, int | float) else _in_gib(value)
            for key, value in renamed.items()
        }
    return [_in_gib(item) for item in data] if isinstance(data, list | tuple) else data
