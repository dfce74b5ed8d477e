"""A Plan as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwise.spec.layout import Layout
from shardwise.spec.memory import GIB
from shardwise.spec.numbers import human
from shardwise.spec.plan import Candidate, ClusterSize, Plan

_REASONS = 6  # of refusals


def layout_words(layout: Layout) -> str:
    """What differs from one rank doing everything: 'dp_shard 8 · tp 2 · zero 3 · micro_batch 2 · recompute full'."""
    degrees = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    words = [f"{name} {getattr(layout, name)}" for name in degrees if getattr(layout, name) > 1]
    if layout.zero:
        words.append(f"zero {layout.zero}")
    if layout.pp > 1:
        words.append(layout.schedule + (f" ×{layout.virtual_stages}" if layout.virtual_stages > 1 else ""))
    words.append(f"micro_batch {layout.micro_batch}")
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    if layout.loss != "full":
        words.append(f"loss {layout.loss}")
    if layout.offload != "none":
        words.append(f"offload {layout.offload}")
    return " · ".join(words)


def print_plan(plan: Plan, console: Console) -> None:
    """The ranked candidates, what was refused, and where the figures come from."""
    run = plan.run
    batch = f"{human(run.recipe.batch_tokens)} tokens a step" if run.recipe.batch_tokens else "batch not given"
    console.print(
        f"{run.model.name} on {run.cluster.gpus} × {run.cluster.gpu.name}, sequence {run.recipe.sequence}, {batch}",
        markup=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("", "right"), ("layout", "left"), ("precision", "left"), ("memory GiB", "right"), ("", "left"),
        ("step s", "right"), ("tokens/s/GPU", "right"), ("MFU", "right"), ("HFU", "right"), ("bubble", "right"),
        ("GPU-h", "right"), ("USD", "right"), ("days", "right"), ("why", "left"),
    ):  # fmt: skip
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for number, candidate in enumerate(plan.candidates, start=1):
        table.add_row(str(number), *_cells(candidate))
    console.print(table)
    console.print(f"{plan.searched} layouts searched in {plan.seconds:.1f} s", markup=False)
    for reason, count in sorted(plan.rejected.items(), key=lambda item: -item[1])[:_REASONS]:
        console.print(f"  refused {count}: {reason}", markup=False)
    for note in plan.notes:
        console.print(note, markup=False)


def print_sizes(sizes: list[ClusterSize], console: Console) -> None:
    """One line per cluster size, or per card."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("GPUs", "right"), ("card", "left"), ("layout", "left"), ("precision", "left"), ("used GiB", "right"),
        ("", "left"), ("tokens/s/GPU", "right"), ("scaling", "right"), ("MFU", "right"), ("GPU-h", "right"),
        ("USD", "right"), ("days", "right"), ("USD/h", "right"),
    ):  # fmt: skip
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for size in sizes:
        time, cost = size.best.time, size.best.cost
        low, _, high = size.best.memory.used
        hourly = cost.price_usd_per_gpu_hour
        table.add_row(
            str(size.gpus),
            size.gpu,
            layout_words(size.best.layout),
            size.best.precision,
            _band(low, high),
            size.best.verdict,
            f"{time.tokens_per_second_per_gpu:,.0f}",
            f"{size.scaling_efficiency:.0%}",
            f"{time.mfu:.1%}",
            human(cost.gpu_hours) if cost.gpu_hours is not None else "–",
            f"{cost.usd:,.0f}" if cost.usd is not None else "–",
            f"{cost.hours / 24:.1f}" if cost.hours is not None else "–",
            f"{hourly * size.gpus:,.2f}" if hourly is not None else "–",
        )
    console.print(table)


def _cells(candidate: Candidate) -> list[str]:
    memory, time, cost = candidate.memory, candidate.time, candidate.cost
    low, _, high = memory.used
    return [
        layout_words(candidate.layout),
        candidate.precision,
        f"{memory.live / GIB:.1f} live, {_band(low, high)} used",
        candidate.verdict,
        f"{time.step_seconds:.3f}",
        f"{time.tokens_per_second_per_gpu:,.0f}",
        f"{time.mfu:.1%}",
        f"{time.hfu:.1%}",
        f"{time.bubble_fraction:.1%}" if candidate.layout.pp > 1 else "–",
        human(cost.gpu_hours) if cost.gpu_hours is not None else "–",
        f"{cost.usd:,.0f}" if cost.usd is not None else "–",
        f"{cost.hours / 24:.1f}" if cost.hours is not None else "–",
        "; ".join(candidate.why),
    ]


def _band(low: float, high: float) -> str:
    """In GiB, of two sizes in bytes; with a decimal where whole numbers would say nothing."""
    digits = 0 if high >= 10 * GIB else 1
    return f"{low / GIB:.{digits}f}–{high / GIB:.{digits}f}"
