"""A rehearsal as text: each part of memory, rehearsed and predicted."""

from __future__ import annotations

from typing import Any

from shardwise.spec.memory import PARTS


def rehearsal_text(document: dict[str, Any]) -> str:
    """document: what `rehearse --json` prints."""
    lines = []
    for one in document.get("ranks", [document]):
        lines += [*_rank(one), ""]
    lines += document["notes"]
    return "\n".join([*lines, f"verdict: {document['verdict']}"])


def _rank(one: dict[str, Any]) -> list[str]:
    memory, planned, time = one["memory"], one["predicted"], one["time"]
    scale, unit = (1, "GiB") if memory["live_gib"] >= 1 else (1024, "MiB")
    lines = [f"rank {one['rank']} ({one['mesh']}), {one['device']}, {one['seconds']:.1f} s"]
    lines.append(f"{unit:<14}  {'rehearsed':>10}  {'predicted':>10}  difference")
    rows = [(part, memory["parts_gib"][part], planned["parts_gib"][part]) for part in PARTS]
    rows += [("live", memory["live_gib"], planned["live_gib"])]
    rows += [("reserved", memory["reserved_gib"], planned["reserved_gib"])]
    for name, found, said in rows:
        found, said = found * scale, said * scale
        lines.append(f"{name:<14}  {found:>10.3f}  {said:>10.3f}  {said - found:>+10.3f}")
    plain = memory["reserved_default_segments_gib"]
    if plain is not None:
        lines.append(f"reserved without expandable segments: {plain * scale:.3f} {unit}")
    if memory["host_gib"]:
        lines.append(f"host memory: {memory['host_gib'] * scale:.3f} {unit}")
    if memory["peak_op"]:
        lines.append(f"peak: {memory['peak_op']} in {memory['peak_module']}; predicted: {planned['event']}")
    lines += [
        f"  {item['gib'] * scale:>8.3f}  {item['part']:<12} {item['op']} in {item['module']}"
        for item in memory["largest"]
    ]
    if time["compute_seconds"] is not None:
        said = f"; predicted {planned['compute_seconds']:.4f}" if planned["compute_seconds"] else ""
        lines.append(f"one step, compute alone: {time['compute_seconds']:.4f} s{said}")
    work = ", ".join(f"{name} {count:.3g}" for name, count in time["tflop_by_op"].items())
    lines.append(f"TFLOP a step: {time['tflop']:.3g} ({work})")
    lines += [f"exact: {text}" for text in one["exact"]]
    lines += [f"modelled: {text}" for text in one["modelled"]]
    return lines + [f"written: {path}" for path in one["files"]]
