"""What every noun shares: frozen, strict, and errors that name the field, the value and what would work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError


class InputError(ValueError):
    """The user's input is wrong (exit code 2). Its text is the whole message that the user reads."""


class Noun(BaseModel):
    """Base of all nouns: immutable, unknown keys refused, dumps to plain YAML types."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()} | set(cls.model_fields)
            for key in data:
                if key not in known:
                    raise PydanticCustomError("unknown_key", "{text}", {"text": unknown("field", str(key), known)})
        return data

    @classmethod
    def load(cls, data: Any, where: str = "") -> Self:
        """Validate plain data. Raises InputError with one line per problem; `where` prefixes each field's path."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InputError("\n".join(describe(error, where))) from None

    def dump(self) -> dict[str, Any]:
        """Plain types only (for YAML and JSON); `load` of it gives an equal noun."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to a misspelt one, or None where nothing is close."""
    found = difflib.get_close_matches(word.lower(), sorted(known), n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(kind: str, word: str, known: Iterable[str]) -> str:
    """The message for a word that is not in a closed list."""
    known = sorted(known)
    near = nearest(word, known)
    return f"unknown {kind} '{word}'" + (f"; did you mean '{near}'?" if near else ".") + f" Known: {', '.join(known)}."


def describe(error: ValidationError, where: str = "") -> list[str]:
    """One line per problem: the field's path, what is wrong with it, the value that was given."""
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(map(str, ([where] if where else []) + list(item["loc"])))
        value, message = item["input"], item["msg"].removeprefix("Value error, ")
        if item["type"] == "literal_error":
            allowed = [word.strip(" '\"") for word in item["ctx"]["expected"].replace(" or ", ",").split(",")]
            message = unknown("value", str(value), allowed)
        elif item["type"] == "missing":
            message = "is required"
        elif not isinstance(value, dict | list) and repr(value) not in message:
            message += f" (it was {value!r})"
        lines.append(f"{path}: {message}" if path else message)
    return lines
