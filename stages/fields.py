"""Types of a recipe's fields: how counts, sizes, flags, paths and lists are written and checked."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

# Lengths and batches are powers of two (32k = 32,768; a 2M-token batch = 64 x 32,768), token
# budgets are decimal (2.5B = 2,500,000,000): the paper counts both ways, and with both 2.5B tokens
# in batches of 2M are 1,192 steps.
_SUFFIX = {"k": 1024, "m": 1024**2, "b": 10**9}
_BYTES = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?\s*$", re.IGNORECASE)
_Value = TypeVar("_Value", int, float)
_Item = TypeVar("_Item", int, str)
_COUNT = re.compile(
    r"^\s*((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]+)?)\s*([kKmMbB]?)\s*$"
)
_FLAGS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
# More than any model, corpus or machine has; sums and products of such counts are exact.
MOST = 10**15
_MAX_PROCESSES = 1024


def parse_count(value: object) -> object:
    """An integer from 32768, "32k", "2M" or "2.5B"; pydantic checks values that are not strings."""
    if not isinstance(value, str):
        return value
    match = _COUNT.match(value)
    if not match:
        raise ValueError(f"'{value}' is not a count: write an integer, or one like 32k, 2M, 2.5B")
    number = float(match[1].replace("_", "").replace(",", ""))
    number *= _SUFFIX[match[2].lower()] if match[2] else 1
    if abs(number - round(number)) > 1e-6:
        raise ValueError(f"'{value}' is not a whole number")
    return round(number)


def bytes_of(text: str) -> int:
    """Bytes of 40GB, 512MiB or 1000000; raises ValueError."""
    match = _BYTES.match(text)
    if match is None:
        raise ValueError(f"expected a size like 40GB or 512MiB, found '{text}'")
    power = " kmgt".index((match[2] or " ").lower())
    number = min(float(match[1]), 2.0**60)  # int() refuses infinity
    return int(number * (1024 if match[3] else 1000) ** power)


def parse_number(value: object) -> object:
    """A float that YAML 1.1 read as a string (`1e-5`)."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"'{value}' is not a number") from None
    return value


def parse_flag(value: object) -> object:
    """A flag; YAML 1.1's words for it are accepted, but not y, n, 1 or 0."""
    return _FLAGS.get(value.lower(), value) if isinstance(value, str) else value


def different(values: list[_Item]) -> list[_Item]:
    """The values; refuses repeated ones."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"names {value} twice")
    return values


def regular_expression(value: str) -> str:
    """A regular expression as Python writes it."""
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"'{value}' is not a regular expression ({error})") from None
    return value


def rising(values: list[_Value]) -> list[_Value]:
    """The values; refuses those that are not strictly ascending."""
    if values != sorted(set(values)):
        raise ValueError("the values must be in ascending order without repeats")
    return values


def split(value: object) -> object:
    """The items of a comma-separated text, as lists are written on the command line."""
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(parse_count), Field(gt=0, le=MOST)]
ProcessesOrAuto = Annotated[int, Field(gt=0, le=_MAX_PROCESSES)] | Literal["auto"]
BatchSize = Annotated[int, Field(gt=0, le=2**20)]
Number = Annotated[float, BeforeValidator(parse_number)]
# Up to a year: torch ignores a timeout of centuries, since its nanoseconds overflow.
Minutes = Annotated[Number, Field(gt=0, le=365 * 24 * 60)]
Flag = Annotated[bool, BeforeValidator(parse_flag)]
PathText = Annotated[str, Field(min_length=1)]
Line = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\n\r]*$")]
Ratio = Annotated[Number, Field(ge=0, le=1)]


class Section(BaseModel):
    """A section of a recipe: unknown keys are refused, values do not change after loading.

    Types are strict: true is not a number, 1 is not a flag. The text below a field describes it.
    `ALTERNATIVES` are groups of fields that exclude each other: at most one is given, and an
    override of one replaces the others in the file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
    ALTERNATIVES: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        for names in self.ALTERNATIVES:
            keys = [name for name in names if getattr(self, name) is not None]
            if len(keys) > 1:
                raise ValueError(f"names {' and '.join(keys)}, which exclude each other; keep one")
        return self

    @classmethod
    def drop_replaced(cls, values: dict[str, Any], overridden: Collection[str]) -> None:
        """Remove from a section's values those that the overridden fields replace."""
        for names in cls.ALTERNATIVES:
            if not set(names).isdisjoint(overridden):
                for name in set(names).difference(overridden):
                    values.pop(name, None)

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Each field's `description=`, or the text below it in the source, in one line.

        pydantic's `use_attribute_docstrings` would read the source whenever a command starts.
        """
        texts: dict[str, str] = {}
        for base in reversed(cls.__mro__[: cls.__mro__.index(Section)]):
            with contextlib.suppress(OSError, TypeError, SyntaxError):  # no source of its own
                [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
                for pair in itertools.pairwise(cast(ast.ClassDef, tree).body):
                    match pair:
                        case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                            texts[name] = " ".join(text.split())
        fields = cls.model_fields.items()
        return {name: field.description or texts.get(name, "") for name, field in fields}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in cls.descriptions().items():
            if text and not cls.model_fields[name].description:  # pydantic adds those
                properties[name]["description"] = text
        return schema
