"""One rank of `calibrate`: python -m shardwise.verbs.calibrate_rank FILE COMMAND [--quick]. Torch is imported late, so
that it can be stopped from its first line on."""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.launching import FailureWatch, run_worker
from shardwise.launching.worker import end_when_stopped, tell

_TIMEOUT_SECONDS = 300


def main() -> int:
    """Measure; rank 0 writes FILE."""
    file, command, *options = sys.argv[1:]
    return run_worker(lambda: calibrate_rank(Path(file), command, quick="--quick" in options))


def calibrate_rank(file: Path, command: str, *, quick: bool) -> int:
    """The rank that the environment names; 0, or the process ends through FailureWatch."""
    end_when_stopped()
    import torch
    import torch.distributed as dist

    from shardwise.parallel.process import process_group
    from shardwise.profiling.calibration.measure import measure

    with process_group("cuda" if torch.cuda.is_available() else "cpu", _TIMEOUT_SECONDS) as process:
        store = dist.distributed_c10d._get_default_store()
        with FailureWatch(store, process.rank, f"rank {process.rank}"):
            first = process.rank == 0
            cluster = measure(process.device, command, tell if first else lambda line: None, quick=quick)
            if first:
                file.write_text(cluster.model_dump_json(by_alias=True, exclude_none=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
