"""`--layout.tp 2`: any field of the Run, on the command line."""

from __future__ import annotations

import re

from shardwise.spec import InputError

_FIELD = re.compile(r"--((?:model|cluster|layout|recipe)|[a-z_]+(?:\.[a-z_0-9]+)+)(?:=(.*))?", re.DOTALL)

Overrides = list[tuple[str, str]]


def split_overrides(words: list[str]) -> tuple[list[str], Overrides]:
    """Part the words of a command line into those for the verb, and (path, value) pairs for the Run.

    A field is `--model`, `--cluster`, `--layout`, `--recipe`, or any option with a dot in its name; but `--cluster` is
    an option of `plan`'s own. Raises InputError for one without a value.
    """
    rest: list[str] = []
    overrides: Overrides = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        match = _FIELD.fullmatch(word)
        if not match or (words[:1] == ["plan"] and match[1] == "cluster"):
            rest.append(word)
        elif match[2] is not None:
            overrides.append((match[1], match[2]))
        elif queue:
            overrides.append((match[1], queue.pop(0)))
        else:
            raise InputError(f"{word}: a value is expected, such as {word} 2")
    return rest, overrides
