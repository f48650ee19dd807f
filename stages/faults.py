"""A fault of a recipe: the field, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bosch.errors import UserError


@dataclass(frozen=True)
class Fault:
    """What is wrong at a dotted path of a recipe."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"

    @classmethod
    def of(cls, error: UserError, path: str) -> Fault:
        """The fault that an error reports; at `path` if it names no field."""
        return cls(error.path or path, error.text)


@contextmanager
def collected(faults: list[Fault], path: str) -> Iterator[None]:
    """Add a UserError of the block to `faults`."""
    try:
        yield
    except UserError as error:
        faults.append(Fault.of(error, path))
