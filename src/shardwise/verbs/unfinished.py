"""Ranks that a verb started and that ended without its answer."""

from __future__ import annotations


class Unfinished(Exception):
    """The ranks ended before the verb had its answer, and have said why. `code` is the exit code: 2, 3 or 4."""

    def __init__(self, verb: str, code: int):
        super().__init__(f"{verb} ended with exit code {code}")
        self.code = code
