"""Needle questions: the six RULER tasks (`niah_single_*`, `niah_multikey_*`) and their words.

Three seed spaces never share a needle: every (key, value) pair belongs to exactly one of them. The
samples are made in `data_prep.haystacks`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

SeedSpace = Literal["calibration", "evaluation", "training"]
Needle = tuple[str, str]

# A pair's checksum modulo 4 says whose it is; evaluation, the largest user, has half of all pairs.
_PAIR_OWNER: tuple[SeedSpace, ...] = ("calibration", "training", "evaluation", "evaluation")

NOISE_LINE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)


@dataclass(frozen=True)
class TaskSpec:
    """Parameters of a needle task; `needles` is the number of keys."""

    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"]
    value: Literal["numbers", "uuids"]
    needles: int
    values: int = 1
    queries: int = 1


TASKS: dict[str, TaskSpec] = {
    "niah_single_1": TaskSpec("noise", "words", "numbers", 1),
    "niah_single_2": TaskSpec("essay", "words", "numbers", 1),
    "niah_single_3": TaskSpec("essay", "words", "uuids", 1),
    "niah_multikey_1": TaskSpec("essay", "words", "numbers", 4),
    "niah_multikey_2": TaskSpec("needles", "words", "numbers", 1),
    "niah_multikey_3": TaskSpec("needles", "uuids", "uuids", 1),
}


@dataclass(frozen=True)
class NeedleSample:
    """One question: the text, the question in it, and the correct answers.

    `prompt` ends with the question; a model continues `prompt + answer_prefix`. `needles` are the
    (key, value) pairs hidden in the text, distractors included.
    """

    task: str
    index: int
    prompt: str
    answer_prefix: str
    answers: list[str]
    needles: list[Needle]

    @property
    def generation_prompt(self) -> str:
        """The text a model continues (RULER's form)."""
        return self.prompt + self.answer_prefix

    @property
    def forced_prompt(self) -> str:
        """The prompt of the teacher-forced form, which includes the colon before the value."""
        return self.prompt + self.answer_prefix + ":"

    @property
    def forced_answer(self) -> str:
        """Text after `forced_prompt`: the value with its leading space."""
        return " " + self.answers[0]


def needle_sentence(key: str, value: str, what: str) -> str:
    """The hidden sentence; `what` is numbers or uuids."""
    return f"One of the special magic {what} for {key} is: {value}."


def question(key: str, what: str, many: bool = False) -> str:
    """The question at the prompt's end; `many`: it has several answers."""
    subject = f"are all the special magic {what}" if many else f"is the special magic {what[:-1]}"
    return f"What {subject} for {key} mentioned in the provided text?"


def answer_prefix(key: str, what: str, many: bool = False) -> str:
    """The beginning of the answer, part of the prompt; the model goes on behind it."""
    noun, verb = (what, "are") if many else (what[:-1], "is")
    return f" The special magic {noun} for {key} mentioned in the provided text {verb}"


def instruction(what: str, many: bool = False) -> str:
    """Beginning of a prompt."""
    noun = what if many else what[:-1]
    hidden = f"Some special magic {what} are" if many else f"A special magic {noun} is"
    return (
        f"{hidden} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {noun} afterwards."
    )


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text to continue: opening special tokens, if any, but no closing one."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if ids and tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that follows a prompt."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def forced_ids(sample: NeedleSample, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Prompt and answer ids of the teacher-forced form; each is tokenised on its own."""
    return (
        encode_prompt(tokenizer, sample.forced_prompt),
        encode_answer(tokenizer, sample.forced_answer),
    )


def pair_owner(key: str, value: str) -> SeedSpace:
    """The one seed space in which this needle can occur."""
    return _PAIR_OWNER[zlib.crc32(f"{key}\n{value}".encode()) % len(_PAIR_OWNER)]
