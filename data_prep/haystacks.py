"""Samples of the needle tasks: needles hidden in as much text as a length allows.

A sample is a function of (task, length, tokenizer, seed space, seed, index) and the essay alone.
"""

from __future__ import annotations

import math
import random
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
from data_prep.sentences import split_by_rule
from data_prep.words import word_key

DEPTHS = [round(depth) for depth in np.linspace(0, 100, 40)]


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

    Args:
        max_new_tokens: Generated tokens, counted inside `length`. None: the teacher-forced form is
            fitted instead, with the answer's own tokens inside `length`.
        essay_words: Words of the essay haystacks, see `data_prep.essays.haystack_words`.

    Evaluation haystacks start with the essay's first word, as RULER's do; the other seed spaces
    start at a drawn one.

    Raises:
        UserError: not even the shortest haystack fits.
    """
    draws = _Draws(task, length, seed_space, seed, index, essay_words)

    def tokens(size: int) -> int:
        sample = draws.sample(size)
        if max_new_tokens is None:
            return sum(len(part) for part in forced_ids(sample, tokenizer))
        return len(encode_prompt(tokenizer, sample.generation_prompt)) + max_new_tokens

    per_unit = _tokens_per_unit(task, tokenizer, tuple(essay_words[:2000]))
    smallest = 0 if TASKS[task].haystack == "essay" else TASKS[task].needles
    return draws.sample(largest_fit(tokens, length, per_unit, smallest, task))


# Only saves time: a value depends on its key alone.
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
    ) -> None:
        if task not in TASKS:
            raise UserError(f"{task} is no needle task: choose from {', '.join(TASKS)}")
        if TASKS[task].haystack == "essay" and not essay_words:
            raise UserError(f"{task} needs an essay, but essay_words is empty")
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
        self._needles = [self._draw_needle(rng) for _ in range(self.spec.needles)]
        self._key, self._value = self._needles[rng.randrange(self.spec.needles)]
        rotated = seed_space != "evaluation" and len(essay_words) > 0
        self._start = start % len(essay_words) if rotated else 0

    def sample(self, size: int) -> NeedleSample:
        """The sample with a haystack of `size` words (essay) or lines (noise, needles)."""
        what = self.spec.value
        context = self._essay(size) if self.spec.haystack == "essay" else self._lines(size)
        hidden = self._needles + self._distractors[: size if self.spec.haystack == "needles" else 0]
        return NeedleSample(
            task=self.task,
            index=self.index,
            prompt=f"{instruction(what)}\n{context}\n{question(self._key, what)}",
            answer_prefix=answer_prefix(self._key, what),
            answers=[self._value],
            needles=hidden,
        )

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
        sentences = split_by_rule(take_words(self._words, self._start, size))
        depths = random.Random(self._place_seed).sample(DEPTHS, len(self._needles))
        places = sorted((int(len(sentences) * depth / 100) for depth in depths), reverse=True)
        for place, needle in zip(places, self._needles, strict=True):
            sentences.insert(place, self._line(needle))
        return " ".join(sentences)

    def _draw_needle(self, rng: random.Random) -> Needle:
        """A pair that belongs to this seed space, its key new in this sample."""
        while True:
            key = draw_value(rng, self.spec.key)
            value = draw_value(rng, self.spec.value)
            if key not in self._keys and pair_owner(key, value) == self.seed_space:
                self._keys.add(key)
                return key, value


def draw_value(rng: random.Random, kind: Literal["words", "numbers", "uuids"]) -> str:
    if kind == "words":
        return word_key(rng)
    if kind == "numbers":
        return str(rng.randrange(1_000_000, 10_000_000))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def take_words(words: Sequence[str], start: int, size: int) -> str:
    """`size` words from `start`, from the beginning again where the essay ends."""
    times = math.ceil((start + size) / len(words))
    tiled = words if times <= 1 else list(words) * times
    return " ".join(tiled[start : start + size])
