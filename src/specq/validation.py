"""What pydantic finds wrong with keys and values, in the words of our messages."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

# what a key takes, by the kind of problem that pydantic names
TAKEN = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "literal_error": "one of {expected}",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "a text",
    "tuple_type": "a list",
    **dict.fromkeys(("model_type", "model_attributes_type"), "a section with keys of its own"),
}


@dataclass(frozen=True)
class Problem:
    """A key with a value it does not take (`rule` says what it does), or one that is missing or unknown.

    `rule` is None for the latter two, and `near` are the known keys for an unknown one, the likeliest alone where
    there is one.
    """

    key: str
    value: str = ""
    rule: str | None = None
    near: tuple[str, ...] = ()


def problems_of(error: ValidationError, schema: type[BaseModel]) -> list[Problem]:
    """All that is wrong; unknown keys come first, since one may be the misspelling of one that is missing."""
    found = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    return [_problem(each, schema) for each in found]


def _problem(found: Any, schema: type[BaseModel]) -> Problem:
    key = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        known = _keys_beside(found["loc"], schema)
        return Problem(key, near=tuple(difflib.get_close_matches(str(found["loc"][-1]), known, n=1) or known))
    if found["type"] == "missing":
        return Problem(key)
    limits = {name: _shown(limit) for name, limit in found.get("ctx", {}).items()}
    taken = TAKEN.get(found["type"])
    message = found["msg"][:1].lower() + found["msg"][1:]
    rule = f"must be {taken.format(**limits).replace(chr(39), '')}" if taken else message
    return Problem(key, value=_shown(found["input"]), rule=rule)


def _shown(value: Any) -> str:
    """The value as it was written, or nearly: whole numbers without a point."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=str)
    except ValueError:  # it holds itself, through an alias of YAML
        return str(value)


def _keys_beside(location: tuple[int | str, ...], schema: type[BaseModel]) -> list[str]:
    """The keys allowed where an unknown one was found."""
    section = schema
    for name in location[:-1]:
        section = _section_in(section.model_fields[str(name)].annotation) or section
    return list(section.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section an annotation speaks of, through `Annotated` and `| None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)
