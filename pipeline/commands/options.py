"""Options of a command as a typed section, checked like a recipe: one option for each field.

Lists are separated by commas. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from bosch.errors import UserError
from bosch.search import methods
from pipeline.recipe.faults import sentences, suggest
from pipeline.recipe.load import listing
from stages.fields import Section, ordered, split

METHODS = methods.FINDING
_Options = TypeVar("_Options", bound=Section)


def add_options(parser: argparse.ArgumentParser, section: type[Section]) -> None:
    """Add an option for each field, with its description as help; a bool is a flag."""
    descriptions = section.descriptions()
    for name, field in section.model_fields.items():
        text = descriptions[name].replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(_option(name), action="store_true", default=None, help=text)
            continue
        default = f" (default: {_as_text(field.default)})" if field.default is not None else ""
        parser.add_argument(_option(name), metavar="…", help=text + default)


def read_options(section: type[_Options], arguments: argparse.Namespace, command: str) -> _Options:
    """The options of the command line or defaults; raises UserError that lists all faulty ones."""
    values = {name: getattr(arguments, name) for name in section.model_fields}
    values = {name: value for name, value in values.items() if value is not None}
    try:
        return section.model_validate(values, strict=False)  # values of the command line are text
    except ValidationError as error:
        faults = []
        for sentence in sentences(section, error):
            path, _, text = sentence.partition(": ")
            faults.append(f"{_option(path.partition('.')[0])}: {text}")
        raise UserError(listing(command, faults)) from None


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _as_text(default: Any) -> str:
    if default == METHODS:
        return "all"
    values = default if isinstance(default, tuple) else (default,)
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def _method(name: str) -> str:
    if name not in METHODS:
        close = suggest(name, METHODS)
        hint = f"did you mean {close}?" if close else f"choose from all, {', '.join(METHODS)}"
        raise ValueError(f"'{name}' is unknown; {hint}")
    return name


def _expand_all(value: object) -> object:
    """The methods in a comma-separated list, with `all` replaced by every method."""
    names = split(value)
    if not isinstance(names, list):
        return names
    return [method for name in names for method in (METHODS if name == "all" else (name,))]


# Lists of numbers are sorted without repetition; methods keep their order.
Seeds = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
    BeforeValidator(split),
    AfterValidator(ordered),
]
Methods = Annotated[
    tuple[Annotated[str, AfterValidator(_method)], ...],
    BeforeValidator(_expand_all),
    AfterValidator(lambda names: tuple(dict.fromkeys(names))),
]
