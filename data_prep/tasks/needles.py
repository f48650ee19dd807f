"""Needle questions: their wording, whose pairs are whose, and RULER's score of an answer.

Three seed spaces never share a needle: every (key, value) pair belongs to exactly one.
"""

from __future__ import annotations

import random
import re
import uuid
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

SeedSpace = Literal["calibration", "evaluation", "training"]
Needle = tuple[str, str]

# Seed space of a pair, by its checksum modulo 4; evaluation draws the most pairs and has half.
_PAIR_OWNER: tuple[SeedSpace, ...] = ("calibration", "training", "evaluation", "evaluation")

NOISE_LINE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_CONTROL = re.compile(r"[\x00-\x1f]")


class Draft(NamedTuple):
    """A prompt with the beginning of its answer, the correct answers, and the hidden needles."""

    text: str
    prefix: str
    answers: list[str]
    needles: list[Needle]


def needle_sentence(key: str, value: str, kind: str) -> str:
    """The hidden sentence; `kind` is numbers or uuids."""
    return f"One of the special magic {kind} for {key} is: {value}."


def question(key: str, kind: str, many: bool = False) -> tuple[str, str]:
    """The question at the prompt's end, and the beginning of its answer, which the model continues.

    `many`: the question has several answers.
    """
    noun, verb = (kind, "are") if many else (kind[:-1], "is")
    subject = f"are all the special magic {kind}" if many else f"is the special magic {noun}"
    text = f"What {subject} for {key} mentioned in the provided text?"
    return text, f" The special magic {noun} for {key} mentioned in the provided text {verb}"


def instruction(kind: str, many: bool = False) -> str:
    noun = kind if many else kind[:-1]
    hidden = f"Some special magic {kind} are" if many else f"A special magic {noun} is"
    return (
        f"{hidden} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {noun} afterwards."
    )


def draw_value(rng: random.Random, kind: Literal["numbers", "uuids"]) -> str:
    if kind == "numbers":
        return str(rng.randrange(1_000_000, 10_000_000))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def pair_owner(key: str, value: str) -> SeedSpace:
    """The only seed space in which this needle can occur."""
    return _PAIR_OWNER[zlib.crc32(f"{key}\n{value}".encode()) % len(_PAIR_OWNER)]


def string_match(output: str, answers: Sequence[str], any_answer: bool = False) -> float:
    """RULER's score of an output: share of the answers that occur in it, in [0, 1].

    Ignores case. With `any_answer` (RULER's string_match_part) one answer is enough for 1.
    """
    text = _CONTROL.sub("\n", output).strip().lower()
    matches = [answer.lower() in text for answer in answers]
    return float(any(matches)) if any_answer else sum(matches) / len(matches)
