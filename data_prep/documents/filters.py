"""Filters of a source's documents, by size and by patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Filters:
    """Conditions on documents. Bounds are inclusive; tokens exclude the end-of-text token.

    `matches` maps fields to regular expressions, which are searched in their values. A missing or
    null field matches nothing.
    """

    min_characters: int | None = None
    max_characters: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    matches: Mapping[str, str] = field(default_factory=dict)

    def allow_record(self, record: Mapping[str, Any]) -> bool:
        """Whether every pattern is found in its field.

        Booleans are written true or false, other values as in Python: 1e5 is 100000.0.
        """
        return all(_matches(record.get(name), pattern) for name, pattern in self.matches.items())

    def allow_text(self, text: str) -> bool:
        return _within(len(text), self.min_characters, self.max_characters)

    def allow_tokens(self, tokens: int) -> bool:
        return _within(tokens, self.min_tokens, self.max_tokens)


def _matches(value: Any, pattern: str) -> bool:
    if isinstance(value, bool):
        value = str(value).lower()
    return value is not None and re.search(pattern, str(value)) is not None


def _within(size: int, low: int | None, high: int | None) -> bool:
    return (low is None or size >= low) and (high is None or size <= high)
