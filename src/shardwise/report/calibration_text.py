"""A calibration in a few lines."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec import Cluster


def summary(cluster: Cluster) -> Iterator[str]:
    """The best of each kind, one a line; the Cluster file has them all."""
    gpu, found = cluster.gpu, cluster.gpu.calibration
    if found is None:
        return
    yield f"{found.device}: {gpu.name}, torch {found.torch}" + (f", driver {found.driver}" if found.driver else "")
    for dtype in dict.fromkeys(row.dtype for row in found.products):
        for kind, grouped in (("products", False), ("experts' products", True)):
            rows = [row for row in found.products if row.dtype == dtype and (row.groups > 1) is grouped]
            if rows:
                best = max(rows, key=lambda row: max(row.forward))
                yield f"{kind} in {dtype}: up to {max(best.forward):.4g} TFLOP/s, with {best.n} × {best.k} weights"
    for backend in dict.fromkeys(row.backend for row in found.attention):
        best_row = max((row for row in found.attention if row.backend == backend), key=lambda row: max(row.backward))
        yield (
            f"attention, {backend}: up to {max(best_row.forward):.4g} TFLOP/s forward, "
            f"{max(best_row.backward):.4g} backward, heads of {best_row.head_dim}"
        )
    if found.copies:
        yield f"copies: {found.copies.device_gb_s:.4g} GB/s read and written" + (
            f", {found.copies.to_device_gb_s:.4g} GB/s from the host" if found.copies.to_device_gb_s else ""
        )
    for row in found.host.layers:
        if row.style == "llama" and not found.host.serial:
            how = ("compiled" if row.compiled else "eager") + (", sharded" if row.sharded else "")
            yield f"host, {how}: {row.forward_us:.0f} + {row.backward_us:.0f} µs a layer"
    if found.ranks > 1 and gpu.intra:
        gather, reduced = gpu.intra.curve[-1], (gpu.intra.reduce_curve or gpu.intra.curve)[-1]
        yield (
            f"link {gpu.intra.name}: {gpu.intra.latency_us:.0f} µs, all-gather {gather[1]:.4g} GB/s, all-reduce "
            f"{reduced[1]:.4g} GB/s at {gather[0] / 2**20:.0f} MiB"
        )
