"""Sections of a recipe of which only some fields are valid, so that the rest can still be checked.

A field at fault is left out; reading it raises InvalidField, which ends the check that needed it
and no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from pipeline.faults import nested_section
from stages.configs import Section

_Section = TypeVar("_Section", bound=Section)
_Location = tuple[int | str, ...]
_LEFT_OUT = object()


class InvalidField(Exception):
    """A field was read that is at fault in the recipe."""


def salvage(kind: type[_Section], value: object) -> tuple[_Section, ValidationError | None]:
    """A section with the fields of `value` that are valid, and what is wrong with the others.

    The section is a whole `kind` where nothing is wrong; otherwise its fields at fault raise
    InvalidField when they are read.
    """
    try:
        return kind.model_validate(value), None
    except ValidationError as error:
        locations = [detail["loc"] for detail in error.errors()]
        return _partial(kind, value, locations), error


def unless_invalid(check: Iterator[str]) -> Iterator[str]:
    """What a check yields before it reads a field at fault."""
    with contextlib.suppress(InvalidField):
        yield from check


def valid(section: Section, name: str) -> Any:
    """A field's value; None where it is at fault."""
    return section.__dict__.get(name)


def _partial(kind: type[_Section], value: object, faults: Sequence[_Location]) -> _Section:
    given = value if isinstance(value, Mapping) else {}
    fields: dict[str, Any] = {}
    for name, info in kind.model_fields.items():
        below = [location[1:] for location in faults if location[:1] in ((name,), ())]
        if below:
            fields[name] = _salvage_field(info, given.get(name), below)
        elif name in given:
            fields[name] = TypeAdapter(_with_limits(info)).validate_python(given[name])
        else:
            fields[name] = info.get_default(call_default_factory=True)
    kept = {name: field for name, field in fields.items() if field is not _LEFT_OUT}
    section = cast(_Section, _partial_type(kind).model_construct(**kept))
    for name in fields.keys() - kept.keys():
        # model_construct has put the default there.
        section.__dict__.pop(name, None)
    return section


def _salvage_field(info: FieldInfo, value: object, faults: Sequence[_Location]) -> Any:
    """What can be kept of a field with faults in it: a section, or a list of sections."""
    nested, is_list = nested_section(info.annotation)
    if nested is None:
        return _LEFT_OUT
    if not is_list:
        return _partial(nested, value, faults)
    if not isinstance(value, list) or () in faults:
        return _LEFT_OUT
    items = []
    for index, item in enumerate(value):
        below = [location[1:] for location in faults if location[0] == index]
        items.append(_partial(nested, item, below) if below else nested.model_validate(item))
    return items


def _with_limits(info: FieldInfo) -> Any:
    """A field's type with its converters and limits."""
    kind: Any = info.annotation
    for limit in info.metadata:
        kind = Annotated[kind, limit]
    return kind


def _partial_type(kind: type[_Section]) -> type[_Section]:
    """A `kind` whose fields may be missing."""

    def refuse(section: Section, name: str) -> Any:
        if name in kind.model_fields:
            raise InvalidField(name)
        raise AttributeError(name)

    body: dict[str, Any] = {"__getattr__": refuse, "__module__": kind.__module__}
    make: Callable[..., type[_Section]] = type(kind)
    return make(kind.__name__, (kind,), body)
