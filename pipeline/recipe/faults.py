"""Turns pydantic's errors about a recipe into faults with dotted paths."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stages.faults import Fault
from stages.fields import Section

# Where pydantic's own words are no recipe's.
_EXPECTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "model_type": "keys below it",
    "model_attributes_type": "keys below it",
    "dict_type": "keys below it",
}


def field_faults(model: type[Section], error: ValidationError) -> list[Fault]:
    """The fault of each place that `error` names; `model` is the type of the recipe."""
    grouped: dict[tuple[str, ...], list[tuple[ErrorDetails, type[Section] | None]]] = {}
    for detail in error.errors():
        location = detail["loc"]
        if detail["type"] == "invalid_key":  # a numeric key of a mapping is not an index of a list
            location = (*location[:-1], str(location[-1]))
        path, owner = _walk(model, location)
        grouped.setdefault(path, []).append((detail, owner))
    return [
        Fault(".".join(path), _describe(path, details, model))
        for path, details in grouped.items()
        # For a faulty item pydantic also reports the list: too short, or none of the allowed words.
        if details[0][0]["type"] not in ("too_short", "literal_error")
        or not any(other[: len(path)] == path != other for other in grouped)
    ]


def known_paths(model: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys that a recipe may have; items of a list are numbered `0`."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        nested, is_list = nested_section(info.annotation)
        if nested is not None:
            yield from known_paths(nested, f"{path}.0." if is_list else f"{path}.")


def suggest(word: str, candidates: Sequence[str]) -> str | None:
    """The candidate that is closest to a misspelt word."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return close[0] if close else None


def nested_section(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section type in an annotation, and whether it is in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    origin = get_origin(annotation)
    if origin in (list, Union, types.UnionType):
        for argument in get_args(annotation):
            nested, is_list = nested_section(argument)
            if nested is not None:
                return nested, is_list or origin is list
    return None, False


def _walk(
    model: type[Section], parts: tuple[int | str, ...]
) -> tuple[tuple[str, ...], type[Section] | None]:
    """Keys to a location, without pydantic's tags and `[key]`, and the section around it."""
    path: list[str] = []
    owner: type[Section] | None = model
    holder, is_key = owner, False
    for name in parts:
        if isinstance(name, int) or is_key:
            path.append(str(name))
            is_key = False
        elif owner is not None:
            path.append(name)
            holder = owner
            field = owner.model_fields.get(name)
            owner = nested_section(field.annotation)[0] if field else None
            is_key = field is not None and get_origin(field.annotation) is dict
    return tuple(path), holder


def _describe(
    path: tuple[str, ...],
    details: list[tuple[ErrorDetails, type[Section] | None]],
    root: type[Section],
) -> str:
    if isinstance(details[0][0]["input"], list):  # do not suggest words for a list
        details = [pair for pair in details if pair[0]["type"] != "literal_error"] or details
    detail, holder = details[0]
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        return "is required and missing"
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown_key(path, root, list(holder.model_fields) if holder else [])
    if kind == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    expected = list(dict.fromkeys(_expected(item) for item, _ in details))
    choices = [word for item, _ in details for word in _choices(item)]
    suggestion = suggest(str(value), choices)
    hint = f"; did you mean {suggestion}?" if suggestion else ""
    return f"expected {' or '.join(expected)}, found {_show(value)}{hint}"


def _unknown_key(path: tuple[str, ...], root: type[Section], siblings: Sequence[str]) -> str:
    """Message for an unknown key; suggests the same key elsewhere and similar keys beside it."""
    *section, name = path
    same_name = [key for key in known_paths(root) if key.rpartition(".")[2] == name]
    below = [key for key in same_name if key.split(".")[: len(section)] == section]
    suggestions = (below or same_name)[:1]
    if sibling := suggest(name, siblings):
        suggestions.append(sibling)
    if suggestions:
        return f"unknown key; did you mean {' or '.join(suggestions)}?"
    return f"unknown key; known here are {', '.join(siblings)}"


def _choices(detail: ErrorDetails) -> list[str]:
    if detail["type"] != "literal_error":
        return []
    expected: str = detail["ctx"]["expected"]
    return expected.replace("' or '", "', '").strip("'").split("', '")


def _expected(detail: ErrorDetails) -> str:
    if detail["type"] in _EXPECTED:
        return _EXPECTED[detail["type"]]
    if detail["type"] == "literal_error":
        return ", ".join(_choices(detail))
    # Checks of this project name what they expected and found themselves.
    message = re.sub("^(Value error, |Input should be |expected )+", "", detail["msg"])
    return message.partition(", found ")[0]


def _show(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= 60 else f"{text[:57]}..."
