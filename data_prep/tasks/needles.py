"""Needle questions: their wording, and the samples of calibration, training and evaluation.

RULER's tasks (`data_prep.tasks.ruler`) use the same wording. Three seed spaces never share a
needle: every (key, value) pair belongs to exactly one. A sample depends only on (task, length,
tokenizer, seed space, seed, index) and the essay.
"""

from __future__ import annotations

import math
import random
import re
import uuid
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from bosch.errors import UserError
from data_prep.tasks.tables import NEEDLES, TaskSpec
from data_prep.tasks.words import KEYS, split_by_rule, word_key
from data_prep.text import encode_answer, encode_prompt

SeedSpace = Literal["calibration", "evaluation", "training"]
Needle = tuple[str, str]

# Seed space of a pair, by its checksum modulo 4; evaluation draws the most pairs and has half.
_PAIR_OWNER: tuple[SeedSpace, ...] = ("calibration", "training", "evaluation", "evaluation")

NOISE_LINE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
# Places of a needle, in percent of an essay's sentences.
DEPTHS = [round(100 * number / 39) for number in range(40)]
_MAX_FITS = 40
_CONTROL = re.compile(r"[\x00-\x1f]")


class Draft(NamedTuple):
    """A prompt with the beginning of its answer, the correct answers, and the hidden needles."""

    text: str
    prefix: str
    answers: list[str]
    needles: list[Needle]

    @property
    def prompt(self) -> str:
        """The text without the beginning of the answer."""
        return self.text[: len(self.text) - len(self.prefix)]


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


def needle_draft(
    spec: TaskSpec, context: str, keys: Sequence[str], answers: list[str], needles: list[Needle]
) -> Draft:
    """The prompt that asks for the values of `keys`; `needles` are the hidden pairs."""
    query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
    kind, many = spec.value, spec.queries * spec.values > 1
    text, prefix = question(query, kind, many)
    return Draft(f"{instruction(kind, many)}\n{context}\n{text}{prefix}", prefix, answers, needles)


def hide(needles: Sequence[str], texts: list[str], places: Sequence[int]) -> list[str]:
    """Insert the needles into `texts` at these places, the first one at the last place."""
    for place, needle in zip(sorted(places, reverse=True), needles, strict=True):
        texts.insert(place, needle)
    return texts


def draw_value(rng: random.Random, kind: Literal["words", "numbers", "uuids"]) -> str:
    if kind == "words":
        return word_key(rng)
    if kind == "numbers":
        return str(rng.randrange(1_000_000, 10_000_000))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_pair(
    rng: random.Random, spec: TaskSpec, space: SeedSpace, used: Collection[str]
) -> Needle:
    """A pair that belongs to this seed space, with a key that is not in `used`.

    Raises UserError where every key is used.
    """
    if spec.key == "words" and len(used) >= KEYS:
        raise UserError(
            f"there are {KEYS:,} different keys for needles, and a sample of this length has more; "
            "lower prepare.calibration.length, or prepare.sequence_length"
        )
    while True:
        key, value = draw_value(rng, spec.key), draw_value(rng, spec.value)
        if key not in used and pair_owner(key, value) == space:
            return key, value


def pair_owner(key: str, value: str) -> SeedSpace:
    """The only seed space in which this needle can occur."""
    return _PAIR_OWNER[zlib.crc32(f"{key}\n{value}".encode()) % len(_PAIR_OWNER)]


def take_words(words: Sequence[str], start: int, size: int) -> str:
    """`size` words from `start`; the essay is repeated where it ends."""
    times = math.ceil((start + size) / len(words))
    tiled = words if times <= 1 else list(words) * times
    return " ".join(tiled[start : start + size])


def make_sample(
    task: str,
    length: int,
    tokenizer: Any,
    seed_space: SeedSpace,
    seed: int,
    index: int,
    max_new_tokens: int,
    essay_words: Sequence[str],
) -> Draft:
    """The sample of this task and index, with the longest haystack that `length` tokens allow.

    Args:
        max_new_tokens: Generated tokens, counted inside `length`.
        essay_words: Words of the essay haystacks, see `data_prep.text.haystack_words`.

    Evaluation haystacks start with the essay's first word, as RULER's do; the other seed spaces
    start at a random word.

    Raises UserError when not even the shortest haystack fits.
    """
    draws = _Draws(task, length, seed_space, seed, index, essay_words)

    def tokens(size: int) -> int:
        return len(encode_prompt(tokenizer, draws.draft(size).text)) + max_new_tokens

    spec = NEEDLES[task]
    per_unit = _tokens_per_unit(task, tokenizer, tuple(essay_words[:2000]))
    smallest = 0 if spec.haystack == "essay" else spec.keys
    return draws.draft(largest_fit(tokens, length, per_unit, smallest, task))


@lru_cache(maxsize=64)
def _tokens_per_unit(task: str, tokenizer: Any, words: tuple[str, ...]) -> float:
    """Approximate tokens of one more word or line of the haystack."""
    spec = NEEDLES[task]
    if spec.haystack == "essay":
        return max(1.0, len(encode_answer(tokenizer, " ".join(words))) / len(words))
    lines = _Draws(task, 0, "evaluation", 0, 0, words).lines(20)
    return max(1.0, len(encode_answer(tokenizer, "\n".join(lines) + "\n")) / len(lines))


class _Draws:
    """The random draws of a sample, which are the same for any size of the haystack.

    Needles are drawn first, distractors one by one when a haystack needs them, and places for each
    size separately. So a longer haystack of the same sample has the same needles.
    """

    def __init__(
        self, task: str, length: int, space: SeedSpace, seed: int, index: int, words: Sequence[str]
    ) -> None:
        self._spec, self._space, self._words = NEEDLES[task], space, words
        entropy = [get_args(SeedSpace).index(space), list(NEEDLES).index(task)]
        import numpy as np

        state = np.random.SeedSequence([*entropy, length, seed, index]).generate_state(16)
        needles, self._place_seed, distractors, start = (
            int.from_bytes(stream.tobytes(), "big") for stream in state.reshape(4, 4)
        )
        self._start = start % len(words) if space != "evaluation" and words else 0
        self._distractor_rng = random.Random(distractors)
        rng = random.Random(needles)
        self._pairs: dict[str, str] = {}
        for _ in range(self._spec.keys):
            self._draw(rng)
        self._keys = list(self._pairs)
        self._queried = self._keys[rng.randrange(self._spec.keys)]

    def draft(self, size: int) -> Draft:
        """The sample with a haystack of `size` words (essay) or lines (noise, needles)."""
        spec, count = self._spec, self._spec.keys
        needles = [self._sentence(key) for key in self._keys]
        rng = random.Random(self._place_seed)
        if spec.haystack == "essay":
            texts, joint = split_by_rule(take_words(self._words, self._start, size)), " "
            places = [int(len(texts) * depth / 100) for depth in rng.sample(DEPTHS, count)]
        else:
            texts, joint = self.lines(size), "\n"
            places = rng.sample(range(size), count)
        context = joint.join(hide(needles, texts, places))
        hidden = list(self._pairs.items())[: count + (size if spec.haystack == "needles" else 0)]
        return needle_draft(spec, context, [self._queried], [self._pairs[self._queried]], hidden)

    def lines(self, size: int) -> list[str]:
        """The lines of a haystack, without the needles."""
        if self._spec.haystack == "noise":
            return [NOISE_LINE] * size
        first = self._spec.keys
        while len(self._pairs) < first + size:
            self._draw(self._distractor_rng)
        return [self._sentence(key) for key in list(self._pairs)[first : first + size]]

    def _sentence(self, key: str) -> str:
        return needle_sentence(key, self._pairs[key], self._spec.value)

    def _draw(self, rng: random.Random) -> None:
        key, value = draw_pair(rng, self._spec, self._space, self._pairs)
        self._pairs[key] = value


def largest_fit(
    tokens: Callable[[int], int], length: int, per_unit: float, smallest: int, name: str
) -> int:
    """About the largest haystack size whose sample has at most `length` tokens.

    Interpolates inside a bracket that shrinks with every step, and bisects it in every fourth step,
    so it ends after a bounded number of steps for any `tokens`. Raises UserError, which names
    `name`, when not even the `smallest` haystack fits.
    """
    fitted, fitted_tokens = smallest, tokens(smallest)
    if fitted_tokens > length:
        raise UserError(
            f"{name} does not fit into {length} tokens: its shortest sample has {fitted_tokens}; "
            "raise the length or leave the task out"
        )
    too_large: int | None = None
    rate = per_unit
    for step in range(_MAX_FITS):
        slack = length - fitted_tokens
        if slack < per_unit or too_large == fitted + 1:
            break
        guess = fitted + max(1, round(slack / rate - 0.25))
        if too_large is not None:
            guess = (fitted + too_large) // 2 if step % 4 == 3 else min(guess, too_large - 1)
        count = tokens(guess)
        rate = max((count - fitted_tokens) / (guess - fitted), 0.1)
        if count <= length:
            fitted, fitted_tokens = guess, count
        else:
            too_large = guess
    return fitted


def string_match(output: str, answers: Sequence[str], any_answer: bool = False) -> float:
    """RULER's score of an output: share of the answers that occur in it, in [0, 1].

    Ignores case. With `any_answer` (RULER's string_match_part) one answer is enough for 1.
    """
    text = _CONTROL.sub("\n", output).strip().lower()
    matches = [answer.lower() in text for answer in answers]
    return float(any(matches)) if any_answer else sum(matches) / len(matches)
