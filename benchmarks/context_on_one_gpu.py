"""Attention of every rank of a simulated context-parallel group on one device, without a group: keys and values of all
ranks are simply there. Compared with attention over whole sequences.

    python -m benchmarks.context_on_one_gpu [--sequence 16384] [--cp 4] [--json FILE]

Errors are the largest ones, divided by the largest value, against fp32 in the plain form; attention over whole
sequences in the same type stands beside them. Times are forward and backward, summed over ranks, as ratios to attention
over whole sequences; without overheads they would be 1. The ring's time is that of its computation alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.model.layers import causal_attention
from shardwise.parallel.attention import attend_block, attend_block_backward
from shardwise.parallel.gathered import attend_pieces
from shardwise.parallel.pieces import own_positions
from shardwise.parallel.ring import merge, seen

Results = list[Tensor]  # output, gradients of queries, keys, values
MODELS = {  # heads, KV heads, size of queries and keys, size of values
    "llama3-8b": (32, 8, 128, 128),
    "deepseek-v3, 16 heads": (16, 16, 192, 128),
}


def whole(tensors: list[Tensor]) -> Results:
    *inputs, grad = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = causal_attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def exact(tensors: list[Tensor]) -> Results:
    """In fp32, one KV head after the other, so that the scores fit."""
    groups = tensors[1].shape[1]
    parts = []
    with sdpa_kernel(SDPBackend.MATH):
        for each in zip(*(x.float().chunk(groups, dim=1) for x in tensors), strict=True):
            parts.append(whole(list(each)))
    return [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]


def spread(
    tensors: list[Tensor], attend: Callable[[list[Tensor], int, list[Tensor]], Iterator[Any]], cp: int
) -> Results:
    """Put together what all ranks compute: each its own part of the output and of the gradient of the queries, and a
    part of the sums that are the gradients of keys and values."""
    positions = [own_positions(tensors[0].shape[2], cp, rank).to(tensors[0].device) for rank in range(cp)]
    wide = [tensors[3].float(), *(x.float() for x in tensors[:3])]
    results = [torch.zeros_like(x) for x in wide]
    for rank in range(cp):
        for index, where, part in attend(tensors, rank, positions):
            results[index].index_add_(2, where, part.float())
    return results


def gathered(tensors: list[Tensor], rank: int, positions: list[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    q, k, v, grad = tensors
    own, all_positions = positions[rank], torch.arange(k.shape[2], device=k.device)
    leaves = [x.detach().requires_grad_() for x in (q[:, :, own], k, v)]
    out = attend_pieces(*leaves, None, rank)
    parts = torch.autograd.grad(out, leaves, grad[:, :, own])
    yield from zip(range(4), (own, own, all_positions, all_positions), (out.detach(), *parts), strict=True)


def ring(tensors: list[Tensor], rank: int, positions: list[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    q, k, v, grad = tensors
    own, scale = positions[rank], q.shape[-1] ** -0.5
    q, grad = q[:, :, own], grad[:, :, own]
    visits = [(rank - step) % len(positions) for step in range(len(positions))]
    out, lse = attend_block(q, k[:, :, own], v[:, :, own], True, scale)
    out = out.float()
    for source in visits[1:]:
        rows, columns = seen(rank, source, len(own) // 2)
        keys, values = (x[:, :, positions[source][columns]] for x in (k, v))
        merge(out[:, :, rows], lse[:, :, rows], *attend_block(q[:, :, rows], keys, values, False, scale))
    yield 0, own, out
    out = out.to(q.dtype)
    for source in visits:
        rows, columns = seen(rank, source, len(own) // 2)
        there = positions[source][columns]
        from_rows = (x[:, :, rows] for x in (grad, q, out, lse))
        parts = attend_block_backward(*from_rows, k[:, :, there], v[:, :, there], source == rank, scale)
        yield from zip((1, 2, 3), (own[rows], there, there), parts, strict=True)


def errors(found: Results, wanted: Results) -> dict[str, float]:
    names = ("output", "by queries", "by keys", "by values")
    pairs = zip(names, found, wanted, strict=True)
    return {name: float(((x.float() - y).abs().max() / y.abs().max()).item()) for name, x, y in pairs}


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def kernels(work: Callable[[], object], device: torch.device) -> list[str]:
    """The attention kernels that ran; none where the profiler cannot say."""
    if device.type != "cuda":
        return []
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
    except RuntimeError as error:
        return [f"unknown: {error}"]
    names = {event.key[:110] for event in profile.key_averages()}
    return sorted(name for name in names if any(word in name.lower() for word in ("flash", "fmha", "cudnn", "sdpa")))


def bare(attend: Callable[..., Iterator[Any]], tensors: list[Tensor], positions: list[Tensor]) -> Callable[[], None]:
    """The work of all ranks, without putting results together."""

    def work() -> None:
        for rank in range(len(positions)):
            for _ in attend(tensors, rank, positions):
                pass

    return work


def compare(name: str, sequence: int, cp: int, device: torch.device) -> dict[str, Any]:
    heads, groups, size, value_size = MODELS[name]
    torch.manual_seed(0)
    shapes = (heads, size), (groups, size), (groups, value_size), (heads, value_size)
    tensors = [torch.randn(1, n, sequence, d, device=device).to(torch.bfloat16) for n, d in shapes]
    positions = [own_positions(sequence, cp, rank).to(device) for rank in range(cp)]
    wanted = exact(tensors)
    answer: dict[str, Any] = {"model": name, "sequence": sequence, "cp": cp}
    full = seconds(lambda: whole(tensors), device)
    answer["whole"] = {"errors": errors(whole(tensors), wanted), "seconds": full,
                       "kernels": kernels(lambda: whole(tensors), device)}  # fmt: skip
    for label, attend in {"all-gather": gathered, "ring": ring}.items():
        work = bare(attend, tensors, positions)
        answer[label] = {
            "errors": errors(spread(tensors, attend, cp), wanted),
            "ratio_of_times": seconds(work, device) / full,
            "kernels": kernels(work, device),
        }
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=16384)
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --sequence 256 shows that the forms agree")
    answers: list[dict[str, Any]] = []
    for name in MODELS:
        try:
            answers.append(compare(name, options.sequence, options.cp, device))
        except RuntimeError as error:  # the other model is still worth its figures
            answers.append({"model": name, "error": str(error)})
        print(json.dumps(answers[-1], indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(answers, indent=2) + "\n")


if __name__ == "__main__":
    main()
