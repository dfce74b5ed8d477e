"""What would change a bottleneck: the planner's neighbouring layouts where a Run is known, and settings of the
trainer."""

from __future__ import annotations

from shardwise.planner.neighbours import Neighbour, neighbours
from shardwise.planner.search import Found
from shardwise.profiling.losses import Losses
from shardwise.spec import Recipe
from shardwise.spec.diagnosis import Remedy
from shardwise.spec.memory import GIB

# Fields of the layout that act on a bottleneck
_FIELDS = {
    "exposed all_gather": ("zero", "micro_batch", "dp_replicate", "tp", "pp"),
    "exposed reduce_scatter": ("zero", "micro_batch", "dp_replicate", "tp", "pp"),
    "exposed tensor": ("tp", "cp", "pp"),
    "exposed context": ("cp", "tp"),
    "exposed expert": ("ep", "tp", "micro_batch"),
    "bubble": ("schedule", "virtual_stages", "micro_batch", "pp"),
    "host-bound": ("micro_batch", "recompute"),
    "memory-bound": ("recompute", "loss", "micro_batch"),
    "kernels below roofline": ("micro_batch", "tp", "recompute"),
    "copies": ("offload",),
    "compute": ("recompute", "tp", "micro_batch"),
}

# Settings that no layout names: what, and why. Their gain is at most what the trace shows to be lost.
_SETTINGS = {
    "input": (
        ("more workers that read ahead (DataLoader: num_workers, prefetch_factor, persistent_workers)",
         "the next batch is then ready before it is asked for"),
        ("tokenise beforehand: `shardwise data prepare`", "reading shards costs no host time worth naming"),
        ("pinned memory and non_blocking copies", "the copy then runs beside compute"),
    ),
    "checkpoint": (
        ("recipe.checkpoint.asynchronous: true", "training only waits for the copy to host memory"),
        ("recipe.checkpoint.every: larger", "each save is paid less often"),
    ),
    "recompilation": (
        ("constant shapes: pad, or drop the last short batch", "each new shape is compiled anew"),
        ("torch._dynamo.mark_dynamic, or compile(dynamic=True)", "one graph then serves all shapes"),
        ("torch.compiler.set_stance('fail_on_recompile')", "names the first guard that fails"),
    ),
    "synchronisation": (
        ("no .item(), .cpu(), print of tensors or torch.cuda.synchronize() in the loop",
         "the host then runs ahead, and the device's queue stays full"),
        ("log every N steps, from a tensor kept on the device", "one wait per N steps"),
    ),
    "host-bound": (
        ("layout.compile: true (or CUDA graphs)", "fewer and longer kernels, less Python between them"),
    ),
    "memory-bound": (("layout.compile: true", "fuses elementwise work with its neighbours"),),
    "kernels below roofline": (
        ("dimensions that are multiples of 64 (vocabulary, hidden, ffn)", "the fast kernels load aligned rows"),
    ),
    "straggler": (
        ("exchange the chip or host of that rank, or compare its clocks and temperature with the others'",
         "every rank waits for the slowest"),
        ("the same work on every rank: equal sequence lengths, balanced experts and stages",
         "where the chip is sound, its share of the work is larger"),
    ),
    "copies": (("pinned memory and non_blocking copies", "copies then run beside compute"),),
    "bubble": (("more micro-batches a step", "the pipeline fills and drains once for all of them"),),
}  # fmt: skip
_ONE_STALL = tuple(
    Remedy.load({"change": change, "why": why})
    for change, why in (
        ("trace later steps", "the first ones start libraries, choose kernels and compile"),
        ("find what the host does there (a file, a lock, another process, Python's garbage collector)",
         "the rest of the step is not held up by launches"),
    )
)  # fmt: skip
_MOST = 3
_WORTH = 0.005  # of the step


def remedies(losses: Losses, found: Found | None = None, recipe: Recipe | None = None) -> tuple[Remedy, ...]:
    """Two or three, those with a predicted gain first, the largest ahead. Without predictions (`found`) the trace's own
    bound is the only figure."""
    cause = losses.bottleneck
    if cause in ("host-bound", "synchronisation") and losses.one_stall:
        return _ONE_STALL
    near = _layouts(cause, found, recipe) if found is not None and recipe is not None else []
    at_most = 100 * losses.seconds.get(cause, 0.0) / losses.mean.seconds
    other = [
        Remedy.load({"change": change, "why": why, "gain_percent": at_most, "class": "upper bound"})
        for change, why in _SETTINGS.get(cause, ())
        if not (found is not None and found.layout.compile and change.startswith("layout.compile"))
    ]
    if not near and found is None:
        other += [
            Remedy.load({"change": f"layout.{field}: another value", "gain_percent": at_most, "class": "upper bound",
                         "why": "give the Run with the trace, and the planner says what each choice gains"})
            for field in _FIELDS.get(cause, ())[:2]
            if cause.startswith("exposed ") or cause == "bubble"
        ]  # fmt: skip
    room = _MOST - min(len(near), 2 if other else _MOST)
    return (*near[: _MOST - min(len(other), room)], *other[:room])


def _layouts(cause: str, found: Found, recipe: Recipe) -> list[Remedy]:
    able = [
        item
        for item in neighbours(found, recipe)
        if item.step_change is not None and item.step_change < -_WORTH and item.verdict != "oom"
    ]
    wanted = _FIELDS.get(cause, ())
    fitting = [item for item in able if item.change.split()[0] in wanted]
    return [as_remedy(item) for item in fitting]


def as_remedy(item: Neighbour) -> Remedy:
    """A neighbouring layout that can run."""
    assert item.step_change is not None and item.layout is not None and item.memory_change is not None
    return Remedy(
        change=f"layout.{item.change}",
        layout=item.layout,
        gain_percent=-100 * item.step_change,
        memory_gib=item.memory_change / GIB,
        class_="modelled",
        why={"tight": "may be tight in memory", "oom": "does not suffice alone"}.get(item.verdict or "", ""),
    )
