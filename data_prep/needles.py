"""Needle-in-a-haystack samples: the six RULER tasks (`niah_single_*`, `niah_multikey_*`).

A sample is a function of (task, length, tokenizer, seed space, seed, index) and the essay alone.
The three seed spaces never share a needle: every (key, value) pair belongs to exactly one of them.
"""

from __future__ import annotations

import math
import random
import re
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np

from bosch.errors import UserError
from data_prep.fitting import largest_fit
from data_prep.words import ADJECTIVES, NOUNS

SeedSpace = Literal["calibration", "evaluation", "training"]
Needle = tuple[str, str]

# A pair's checksum modulo 4 says whose it is; evaluation, the largest user, has half of all pairs.
_PAIR_OWNER: tuple[SeedSpace, ...] = ("calibration", "training", "evaluation", "evaluation")

NOISE_LINE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_DEPTHS = [round(depth) for depth in np.linspace(0, 100, 40)]

# White space behind a full stop (a closing quote or bracket may follow it), before a new sentence;
# the stop of an initial ends nothing.
_SENTENCE_END = re.compile(
    r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))(?<!\b[A-Za-z]\.)\s+(?=["'(\[]?[A-Z0-9])"""
)


@dataclass(frozen=True)
class TaskSpec:
    """What distinguishes one needle task from another."""

    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"]
    value: Literal["numbers", "uuids"]
    needles: int


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
    """One question: text, what is asked and what is right.

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
        """The text before the answer when the answer is given: it holds the needle's colon too."""
        return self.prompt + self.answer_prefix + ":"

    @property
    def forced_answer(self) -> str:
        """What stands behind `forced_prompt`: the value alone, with its space."""
        return " " + self.answers[0]


def needle_sentence(key: str, value: str, what: str) -> str:
    """The hidden sentence; `what` is numbers or uuids."""
    return f"One of the special magic {what} for {key} is: {value}."


def question(key: str, what: str) -> str:
    """The question at the prompt's end."""
    noun = what.removesuffix("s")
    return f"What is the special magic {noun} for {key} mentioned in the provided text?"


def answer_prefix(key: str, what: str) -> str:
    """The answer's beginning, which is given; the model continues with a colon and the value."""
    noun = what.removesuffix("s")
    return f" The special magic {noun} for {key} mentioned in the provided text is"


def _instruction(what: str) -> str:
    noun = what.removesuffix("s")
    return (
        f"A special magic {noun} is hidden within the following text. Make sure to memorize it. "
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
    """Prompt and answer ids of the teacher-forced form; each part is tokenised on its own."""
    return (
        encode_prompt(tokenizer, sample.forced_prompt),
        encode_answer(tokenizer, sample.forced_answer),
    )


def make_sample(
    task: str,
    length: int,
    tokenizer: Any,
    seed_space: SeedSpace,
    seed: int,
    index: int,
    max_new_tokens: int | None,
    essay_words: Sequence[str],
) -> NeedleSample:
    """The sample of this task and index, its haystack as long as `length` tokens allow.

    Args and errors as in `make_samples`.
    """
    (sample,) = make_samples(
        task, length, tokenizer, seed_space, seed, index, max_new_tokens, essay_words
    )
    return sample


def make_samples(
    task: str,
    length: int,
    tokenizer: Any,
    seed_space: SeedSpace,
    seed: int,
    index: int,
    max_new_tokens: int | None,
    essay_words: Sequence[str],
    questions: int = 1,
) -> list[NeedleSample]:
    """Samples that ask `questions` different questions about one haystack.

    The haystack hides at least as many needles. It is as long as `length` tokens allow, with the
    longest question.

    Args:
        max_new_tokens: Generated tokens, counted inside `length`. None: the teacher-forced form is
            made to fit instead, with the answer's own tokens inside `length`.
        essay_words: Words of the essay haystacks, see `data_prep.essays.haystack_words`.

    Evaluation haystacks start with the essay's first word, as RULER's do; the other seed spaces
    start at a drawn one.

    Raises:
        UserError: not even the shortest haystack fits.
    """
    draws = _Draws(task, length, seed_space, seed, index, essay_words, questions)

    def tokens(size: int) -> int:
        return max(tokens_of(sample) for sample in draws.samples(size))

    def tokens_of(sample: NeedleSample) -> int:
        if max_new_tokens is None:
            return sum(len(part) for part in forced_ids(sample, tokenizer))
        return len(encode_prompt(tokenizer, sample.generation_prompt)) + max_new_tokens

    per_unit = _tokens_per_unit(task, tokenizer, tuple(essay_words[:2000]))
    smallest = 0 if TASKS[task].haystack == "essay" else draws.needles
    what = task if questions == 1 else f"{task} with {questions} questions per haystack"
    return draws.samples(largest_fit(tokens, length, per_unit, smallest, what))


# Only saves time: what is kept depends on nothing but the key.
_UNIT_TOKENS: WeakKeyDictionary[Any, dict[tuple[str, int], float]] = WeakKeyDictionary()


def _tokens_per_unit(task: str, tokenizer: Any, words: tuple[str, ...]) -> float:
    """Tokens one more word or line of haystack adds, roughly."""
    known = _UNIT_TOKENS.setdefault(tokenizer, {})
    key = (task, hash(words))
    if key not in known:
        known[key] = _measure_unit(task, tokenizer, words)
    return known[key]


def _measure_unit(task: str, tokenizer: Any, words: tuple[str, ...]) -> float:
    spec = TASKS[task]
    if spec.haystack == "essay":
        return max(1.0, len(encode_answer(tokenizer, " ".join(words))) / len(words))
    draws = _Draws(task, 0, "evaluation", 0, 0, words)
    lines = (
        [NOISE_LINE] * 20 if spec.haystack == "noise" else [draws.distractor(i) for i in range(20)]
    )
    return max(1.0, len(encode_answer(tokenizer, "\n".join(lines) + "\n")) / len(lines))


class _Draws:
    """Everything random in a sample, independent of the haystack's size.

    Needles come first, distractors are drawn one by one when asked for, places anew for every
    size: a longer haystack of the same sample has the same needles.
    """

    def __init__(
        self,
        task: str,
        length: int,
        seed_space: SeedSpace,
        seed: int,
        index: int,
        essay_words: Sequence[str],
        questions: int = 1,
    ) -> None:
        if task not in TASKS:
            raise UserError(f"{task} is no needle task: choose from {', '.join(TASKS)}")
        if TASKS[task].haystack == "essay" and not essay_words:
            raise UserError(f"{task} needs an essay: no words were given")
        self.task, self.spec, self.index, self.seed_space = task, TASKS[task], index, seed_space
        self._words = essay_words
        entropy = [get_args(SeedSpace).index(seed_space), list(TASKS).index(task)]
        sequence = np.random.SeedSequence([*entropy, length, seed, index])
        streams = sequence.generate_state(16).reshape(4, 4)
        needles, self._place_seed, rest, start = (
            int.from_bytes(s.tobytes(), "big") for s in streams
        )
        self._distractor_rng = random.Random(rest)
        self._keys: set[str] = set()
        self._distractors: list[Needle] = []
        rng = random.Random(needles)
        self.needles = max(questions, self.spec.needles)
        self._needles = [self._draw_needle(rng) for _ in range(self.needles)]
        first = rng.randrange(self.needles)
        self._asked = [(first + number) % self.needles for number in range(questions)]
        rotated = seed_space != "evaluation" and len(essay_words) > 0
        self._start = start % len(essay_words) if rotated else 0

    def samples(self, size: int) -> list[NeedleSample]:
        """The samples with a haystack of `size` words (essay) or lines (noise, needles)."""
        what = self.spec.value
        context = self._essay(size) if self.spec.haystack == "essay" else self._lines(size)
        hidden = self._needles + self._distractors[: size if self.spec.haystack == "needles" else 0]
        return [
            NeedleSample(
                task=self.task,
                index=self.index * len(self._asked) + number,
                prompt=f"{_instruction(what)}\n{context}\n{question(key, what)}",
                answer_prefix=answer_prefix(key, what),
                answers=[value],
                needles=hidden,
            )
            for number, (key, value) in enumerate(self._needles[asked] for asked in self._asked)
        ]

    def distractor(self, number: int) -> str:
        """The line of the `number`-th distractor needle."""
        while len(self._distractors) <= number:
            self._distractors.append(self._draw_needle(self._distractor_rng))
        return self._line(self._distractors[number])

    def _line(self, needle: Needle) -> str:
        return needle_sentence(*needle, self.spec.value)

    def _lines(self, size: int) -> str:
        if self.spec.haystack == "noise":
            lines = [NOISE_LINE] * size
        else:
            lines = [self.distractor(number) for number in range(size)]
        places = random.Random(self._place_seed).sample(range(size), len(self._needles))
        for place, needle in zip(sorted(places, reverse=True), self._needles, strict=True):
            lines.insert(place, self._line(needle))
        return "\n".join(lines)

    def _essay(self, size: int) -> str:
        sentences = _SENTENCE_END.split(_take_words(self._words, self._start, size))
        depths = random.Random(self._place_seed).sample(_DEPTHS, len(self._needles))
        places = sorted((int(len(sentences) * depth / 100) for depth in depths), reverse=True)
        for place, needle in zip(places, self._needles, strict=True):
            sentences.insert(place, self._line(needle))
        return " ".join(sentences)

    def _draw_needle(self, rng: random.Random) -> Needle:
        """A pair that belongs to this seed space, its key new in this sample."""
        while True:
            key = _draw(rng, self.spec.key)
            value = _draw(rng, self.spec.value)
            if key not in self._keys and pair_owner(key, value) == self.seed_space:
                self._keys.add(key)
                return key, value


def pair_owner(key: str, value: str) -> SeedSpace:
    """The one seed space in which this needle can occur."""
    return _PAIR_OWNER[zlib.crc32(f"{key}\n{value}".encode()) % len(_PAIR_OWNER)]


def _draw(rng: random.Random, kind: Literal["words", "numbers", "uuids"]) -> str:
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "numbers":
        return str(rng.randrange(1_000_000, 10_000_000))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _take_words(words: Sequence[str], start: int, size: int) -> str:
    """`size` words from `start`, from the beginning again where the essay ends."""
    times = math.ceil((start + size) / len(words))
    tiled = words if times <= 1 else list(words) * times
    return " ".join(tiled[start : start + size])
