"""What every command shares: a verb's mistakes and exit code become the process's."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from shardwise.spec import InputError


def verb(function: Callable[..., int]) -> Callable[..., None]:
    """Wrap a command that returns its exit code: InputError ends it with 2, anything unforeseen with 3."""

    @functools.wraps(function)
    def command(*arguments: Any, **options: Any) -> None:
        try:
            code = function(*arguments, **options)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
        except BrokenPipeError:  # `… | head`: the reader has seen enough
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  so that flushing at exit fails no more
            code = 0
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 3
        except Exception:
            traceback.print_exc()
            code = 3
        raise typer.Exit(code)

    return command
