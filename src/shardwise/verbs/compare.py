"""`compare` and `whatif`: two Runs' predictions side by side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.planner.comparison import Comparison
from shardwise.spec import InputError, Run, load_run
from shardwise.verbs.notes import on_precisions
from shardwise.verbs.predicted import fill_cluster, predict_run


def compare(
    first: Run | dict[str, Any], second: Run | dict[str, Any], *, titles: tuple[str, str] = ("A", "B")
) -> Comparison:
    """Both predictions. Raises InputError, beginning with the title of the Run that is wrong."""
    runs, candidates, notes = [], [], []
    for title, run in zip(titles, (first, second), strict=True):
        try:
            resolved, _, candidate, told = predict_run(run if isinstance(run, Run) else Run.load(run))
        except InputError as error:
            raise InputError(f"{title}: {error}") from None
        runs.append(resolved)
        candidates.append(candidate)
        notes += [f"{title}: {note}" for note in told]
    own, other = (run.recipe.precision for run in runs)
    said = (*_once(notes, titles), *on_precisions(own, [other]))
    return Comparison(titles, (runs[0], runs[1]), (candidates[0], candidates[1]), said)


def whatif(source: str | Path | dict[str, Any], changes: Iterable[tuple[str, str]]) -> Comparison:
    """A Run, and the same with fields changed, such as `("cluster.gpus", "128")`.

    Where the changed layout does not make as many ranks as there are chips, dp_shard (DDP: dp_replicate) makes up for
    it, unless it was given. Raises InputError.
    """
    changes = list(changes)
    if not changes:
        raise InputError("nothing is changed: name at least one field, such as --cluster.gpus 128 or --layout.tp 2")
    first, second = load_run(source), load_run(source, changes)
    notes: tuple[str, ...] = ()
    if not {path for path, _ in changes} & {"layout", "layout.dp_shard", "layout.dp_replicate"}:
        second, notes = fill_cluster(second)
    answer = compare(first, second, titles=("as it is", "changed"))
    return Comparison(answer.titles, answer.runs, answer.candidates, (*notes, *answer.notes))


def _once(notes: list[str], titles: tuple[str, str]) -> tuple[str, ...]:
    """What holds for both is said once, without a title."""
    first, second = (
        [note.removeprefix(f"{title}: ") for note in notes if note.startswith(f"{title}: ")] for title in titles
    )
    both = [note for note in first if note in second]
    single = [note for note in notes if not any(note.endswith(f": {shared}") for shared in both)]
    return (*both, *single)
