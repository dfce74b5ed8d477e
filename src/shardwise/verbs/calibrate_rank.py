"""One rank of `calibrate`: python -m shardwise.verbs.calibrate_rank FILE COMMAND [--quick]. Torch is imported late, so
that it can be stopped from its first line on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.launching import FailureWatch, run_worker
from shardwise.launching.worker import end_when_stopped, tell
from shardwise.spec.calibration import HostTimes

_TIMEOUT_SECONDS = 300


def main() -> int:
    """Measure; rank 0 writes FILE."""
    file, command, *options = sys.argv[1:]
    return run_worker(lambda: calibrate_rank(Path(file), command, quick="--quick" in options))


def calibrate_rank(file: Path, command: str, *, quick: bool) -> int:
    """The rank that the environment names; 0, or the process ends through FailureWatch."""
    end_when_stopped()
    first = os.environ.get("RANK", "0") == "0"
    say = tell if first else lambda line: None
    host = _host_times(say, quick=quick) if first else HostTimes()  # the others wait for the process group
    import torch
    import torch.distributed as dist

    from shardwise.parallel.process import process_group
    from shardwise.profiling.calibration.measure import measure

    with process_group("cuda" if torch.cuda.is_available() else "cpu", _TIMEOUT_SECONDS) as process:
        store = dist.distributed_c10d._get_default_store()
        with FailureWatch(store, process.rank, f"rank {process.rank}"):
            cluster = measure(process.device, command, say, host=host, quick=quick)
            if first:
                file.write_text(cluster.model_dump_json(by_alias=True, exclude_none=True))
    return 0


def _host_times(say: Callable[[str], None], *, quick: bool) -> HostTimes:
    from shardwise.rehearsal.host_times import measure_host_times

    began = time.perf_counter()
    found = measure_host_times(quick=quick)
    say(f"host: {len(found.layers)} kinds of layers, {time.perf_counter() - began:.1f} s")
    return found


if __name__ == "__main__":
    sys.exit(main())
