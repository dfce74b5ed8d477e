"""What the host takes for a step of our trainer: steps of models whose kernels take next to nothing, on every kind of
layout, as one rank of a fake process group.

A layer's time is the difference between a deep and a shallow model, over the layers that it has more.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from shardwise.parallel.apply import build_parallel
from shardwise.parallel.compat import fake_process_group, gathers_without_copies
from shardwise.parallel.mesh import build_mesh
from shardwise.rehearsal.child import in_children
from shardwise.spec import Layout, Run
from shardwise.spec.calibration import HostExtra, HostLayer, HostTimes
from shardwise.training.loop import Trainer

_WORLD = 8
_SHALLOW, _DEEP = 2, 10
_WARM, _TIMED = 3, 7
_STYLES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"preset": "gpt2-124m"},
    "qk_norm": {"qk_norm": True},
    "experts": {"experts": {"count": 16, "top_k": 2, "ffn": 64}},
}
_SHARDED = {"dp_shard": _WORLD}
# name: style, layout; of ranks that share what is measured with nobody, and of one of eight
_ALONE: dict[str, tuple[str, dict[str, Any]]] = {style: (style, {"zero": 0}) for style in _STYLES}
_TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    **{style: (style, _SHARDED) for style in _STYLES},
    "selective": ("llama", {**_SHARDED, "recompute": "selective"}),
    "full": ("llama", {**_SHARDED, "recompute": "full"}),
    "tensor": ("llama", {"dp_shard": 2, "tp": 4}),
    "context": ("llama", {"dp_shard": 2, "cp": 4}),
    "expert": ("experts", {**_SHARDED, "ep": _WORLD}),
}
_EXTRAS = ("selective", "full", "tensor", "context", "expert")

# Of a layer: forward, backward, update. Of a micro-batch: before its first layer, outside of layers after that. Step.
Times = tuple[float, float, float, float, float, float]


def measure_host_times(*, quick: bool = False) -> HostTimes:
    """On the first GPU, or where there is none on a CPU. In processes of its own: the caller's may not have used CUDA
    or a process group yet. quick: without the compiler."""
    calls = [(1, _ALONE | ({} if quick else {"compiled": ("llama", {"zero": 0, "compile": True})}))]
    calls += [(_WORLD, _TOGETHER | ({} if quick else {"compiled": ("llama", {**_SHARDED, "compile": True})}))]
    alone, together = in_children(_measure, calls, at_once=1)
    layers = []
    for sharded, found in ((False, alone), (True, together)):
        rows = [(style, False, found[style]) for style in _STYLES]
        if "compiled" in found:
            rows.append(("llama", True, found["compiled"]))
        layers += [
            HostLayer.load({"style": style, "sharded": sharded, "compiled": compiled, **_fields(times)})
            for style, compiled, times in rows
        ]
    extras = []
    for name in _EXTRAS:
        base, more = together[_TOGETHER[name][0]], together[name]
        extras.append(
            HostExtra.load(
                {"of": name, **{f"{what}_us": _us(more[i] - base[i]) for i, what in enumerate(("forward", "backward"))}}
            )
        )
    return HostTimes(
        serial=not torch.cuda.is_available(),
        layers=tuple(layers),
        extras=tuple(extras),
        first_us=max(0.0, _us(together["llama"][3])),
        rest_us=max(0.0, _us(together["llama"][4])),
        step_us=max(0.0, _us(together["llama"][5])),
    )


def _fields(times: Times) -> dict[str, float]:
    return {f"{what}_us": max(0.0, _us(times[i])) for i, what in enumerate(("forward", "backward", "update"))}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _measure(world: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Times]:
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    fake_process_group(0, world)
    found = {}
    for name, (style, layout) in cases.items():
        deep, shallow = (_step(_run(style, layout, layers, kind), kind) for layers in (_DEEP, _SHALLOW))
        _, forward, both, update = ((a - b) / (_DEEP - _SHALLOW) for a, b in zip(deep, shallow, strict=True))
        first, rest = shallow[0], shallow[2] - shallow[0] - _SHALLOW * both
        found[name] = (forward, both - forward, update, first, rest, shallow[3] - _SHALLOW * update)
    return found


def _run(style: str, layout: dict[str, Any], layers: int, kind: str) -> Run:
    """As small as kernels allow: on a GPU heads of 64, on a CPU, which computes itself, of 8."""
    spread, head = Layout.load(layout), 64 if kind == "cuda" else 8
    model = {"preset": "llama3-8b", "hidden": 8 * head, "heads": 8, "kv_heads": 4, "head_dim": head, "ffn": 8 * head,
             "vocabulary": 512, **_STYLES[style], "layers": layers}  # fmt: skip
    if style == "gpt":
        model["kv_heads"] = 8
    return Run.load(
        {
            "model": model,
            "cluster": {"gpu": "h200-sxm" if kind == "cuda" else "cpu", "gpus": spread.world},
            "layout": spread,
            "recipe": {
                "sequence": 64,
                "batch_tokens": 64 * spread.data_ranks,
                "steps": 2,
                "precision": "bf16" if kind == "cuda" else "fp32",
            },
        }
    )


def _step(run: Run, kind: str) -> tuple[float, ...]:
    """Median seconds: before the first block's forward; from there to the end of the last one's; forward and backward;
    gradient norm and update."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    module = build_parallel(run, build_mesh(run.fixed_layout, kind), device)
    trainer = Trainer(run, module, lambda: False)
    (stage,) = (getattr(stage, "module", stage) for stage in module.stages.values())
    blocks: list[nn.Module] = list(stage.blocks.values())
    moments: list[float] = []

    def look(*_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not where a backward repeats it
            moments.append(time.perf_counter())

    blocks[0].register_forward_pre_hook(look)
    blocks[-1].register_forward_hook(look)
    shape = (run.fixed_layout.micro_batch, run.recipe.sequence)
    batch = [tuple(torch.randint(run.model.vocabulary, shape, device=device) for _ in range(2))]
    taken = []
    for index in range(_WARM + _TIMED):
        moments.clear()
        _wait(device)
        with gathers_without_copies(eager=not run.fixed_layout.compile) if index else nullcontext():
            began = time.perf_counter()
            trainer._forward_backward(batch, shape[0] * shape[1])  # type: ignore[arg-type]
            _wait(device)
            between = time.perf_counter()
            module.gradient_norm()
            trainer._update(2.0, 1e-5)
            module.drop_gradients()
            _wait(device)
        taken.append((moments[0] - began, moments[1] - moments[0], between - began, time.perf_counter() - between))
    return tuple(statistics.median(series) for series in zip(*taken[_WARM:], strict=True))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
