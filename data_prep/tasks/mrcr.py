"""MRCR (openai/mrcr; the task is of arXiv:2409.12640): which of several equal requests is meant.

A conversation holds 2, 4 or 8 requests of the same wording; the model repeats the i-th answer after
a random string. Read from the data's public layout, Parquet or JSONL with the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from bosch.files import parse_json

FIELDS = ("prompt", "answer", "random_string_to_prepend", "n_needles")
_MOST_NEEDLES = 1000


class MrcrSample(NamedTuple):
    """A conversation whose last turn asks, its answer, and how that begins."""

    needles: int
    turns: list[dict[str, str]]
    answer: str
    prefix: str


def sample_of(row: Mapping[str, Any]) -> MrcrSample:
    """The sample of a row; raises KeyError, TypeError or ValueError where the row is none."""
    prompt, answer, prefix, needles = (row[name] for name in FIELDS)
    if not isinstance(prompt, str):
        raise ValueError("prompt is no text that holds JSON")
    turns = [
        {"role": turn["role"], "content": turn["content"]} for turn in parse_json(prompt.encode())
    ]
    # Without one of these every output would have the same score.
    if not turns or not all(isinstance(text, str) and text for text in (answer, prefix)):
        raise ValueError("a conversation, its answer and the string before it must not be empty")
    texts = [text for turn in turns for text in turn.values()]
    "".join([answer, prefix, *texts]).encode()  # texts alone, and no half a surrogate
    if type(needles) is not int or not 0 < needles < _MOST_NEEDLES:
        raise ValueError(f"n_needles is {needles!r:.60}")
    return MrcrSample(needles, turns, answer, prefix)


def plain_text(turns: list[dict[str, str]]) -> str:
    """The conversation for a model without a chat template, ending where its answer begins."""
    spoken = [f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns]
    return "\n\n".join([*spoken, "Assistant:"])


def score(output: str, answer: str, prefix: str) -> float:
    """Ratio of difflib's SequenceMatcher of output and answer behind the random string.

    0 where the output, without blanks around it, does not begin with the string.
    """
    output = output.strip()
    if not output.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, output.removeprefix(prefix), answer.removeprefix(prefix)).ratio()
