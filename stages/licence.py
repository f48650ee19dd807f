"""The licence that a model card states."""

from __future__ import annotations

from pathlib import Path

import yaml

from bosch.files import read_within

_FRONT = "---"
_KEYS = ("license", "license_name", "license_link")
_MOST_CHARACTERS = 500
_MOST_BYTES = 4 * 2**20


def licence_of(card: Path) -> dict[str, str]:
    """The licence's fields in the front matter of a model card; empty where none can be read.

    Only their own lines are parsed: a stranger wrote the rest.
    """
    try:
        lines = read_within(card, _MOST_BYTES).decode().splitlines()
    except (OSError, ValueError):
        return {}
    if not lines or lines[0].strip() != _FRONT or _FRONT not in lines[1:]:
        return {}
    licence = {}
    for line in lines[1 : lines.index(_FRONT, 1)]:
        key, _, text = line.partition(":")
        if key in _KEYS and len(text) <= _MOST_CHARACTERS:
            try:
                value = yaml.safe_load(text)
            except (yaml.YAMLError, ValueError, RecursionError):
                continue
            if isinstance(value, str):
                licence[key] = value
    return {key: licence[key] for key in _KEYS if key in licence}
