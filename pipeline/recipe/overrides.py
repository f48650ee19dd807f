"""Command-line overrides: `search.swa_ratio=0.5`, `prepare.sources.0.weight=2`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from bosch.errors import UserError
from pipeline.recipe.yaml_file import parse_yaml


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of a recipe's mapping with `key.path=value` set; values are read as YAML.

    A number in the path is an index into a list that exists; missing mappings are made.
    Raises UserError for a path that leads through something else.
    """
    result = copy.deepcopy(content)
    for override in overrides:
        keys, (_, equals, text) = dotted_path(override), override.partition("=")
        if not equals or not all(keys):
            raise UserError(
                f"override '{override}': expected key.path=value, like search.swa_ratio=0.5"
            )
        _set(result, keys, parse_yaml(text, f"override '{override}'"), override)
    return result


def dotted_path(override: str) -> list[str]:
    """The keys that lead to what an override replaces."""
    return override.partition("=")[0].strip().split(".")


def _set(content: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    here: Any = content
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        index: Any = key
        if isinstance(here, list):
            index = _index(here, key, ".".join(keys[:depth]), override)
        elif not isinstance(here, dict):
            raise UserError(
                f"override '{override}': {'.'.join(keys[:depth])} is the value {here!r} "
                "and has no keys below it"
            )
        if last:
            here[index] = value
            return
        if isinstance(here, dict) and here.get(index) is None:
            here[index] = {}
        here = here[index]


def _index(items: list[Any], key: str, path: str, override: str) -> int:
    if not key.isdecimal() or len(key) > 6 or int(key) >= len(items):
        raise UserError(
            f"override '{override}': {path} is a list of {len(items)}; "
            f"'{key}' is none of its positions 0 to {len(items) - 1}"
        )
    return int(key)
