"""Samples of the needle tasks: needles hidden in as much text as a length allows.

A sample is a function of (task, length, tokenizer, seed space, seed, index) and the essay alone.
"""

from __future__ import annotations

import math
import random
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np

from bosch.errors import UserError
from data_prep.fitting import largest_fit
from data_prep.needles import (
    NOISE_LINE,
    TASKS,
    Needle,
    NeedleSample,
    SeedSpace,
    answer_prefix,
    encode_answer,
    encode_prompt,
    forced_ids,
    instruction,
    needle_sentence,
    pair_owner,
    question,
)
from data_prep.words import word_key

_DEPTHS = [round(depth) for depth in np.linspace(0, 100, 40)]

# White space behind a full stop (a closing quote or bracket may follow it), before a new sentence;
# the stop of an initial ends nothing.
_SENTENCE_END = re.compile(
    r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))(?<!\b[A-Za-z]\.)\s+(?=["'(\[]?[A-Z0-9])"""
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
                prompt=f"{instruction(what)}\n{context}\n{question(key, what)}",
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


def _draw(rng: random.Random, kind: Literal["words", "numbers", "uuids"]) -> str:
    if kind == "words":
        return word_key(rng)
    if kind == "numbers":
        return str(rng.randrange(1_000_000, 10_000_000))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _take_words(words: Sequence[str], start: int, size: int) -> str:
    """`size` words from `start`, from the beginning again where the essay ends."""
    times = math.ceil((start + size) / len(words))
    tiled = words if times <= 1 else list(words) * times
    return " ".join(tiled[start : start + size])
