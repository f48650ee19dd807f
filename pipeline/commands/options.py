"""Options of a command as a typed section, checked like a recipe: one option for each field.

Lists are separated by commas. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
from typing import Any, TypeVar

from pydantic import ValidationError

from bosch.errors import UserError
from pipeline.recipe.faults import sentences
from pipeline.recipe.load import listing
from stages.fields import Section

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
    values = default if isinstance(default, tuple) else (default,)
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
