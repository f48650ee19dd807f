"""RULER's score of one answer, and the mean of many with its standard error."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def string_match(output: str, answers: Sequence[str], any_answer: bool = False) -> float:
    """Share of the answers that occur in the output, case-insensitive, in [0, 1].

    With `any_answer` (RULER's string_match_part) one of them is enough for 1.
    """
    text = _CONTROL.sub("\n", output).strip().lower()
    matches = [answer.lower() in text for answer in answers]
    return float(any(matches)) if any_answer else sum(matches) / len(matches)


def mean_and_error(scores: Sequence[float]) -> tuple[float, float]:
    """Mean in percent and its standard error (0 for a single score)."""
    count = len(scores)
    mean = sum(scores) / count
    if count < 2:
        return 100 * mean, 0.0
    variance = sum((score - mean) ** 2 for score in scores) / (count - 1)
    return 100 * mean, 100 * math.sqrt(variance / count)
