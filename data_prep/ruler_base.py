"""What RULER's tasks have in common: sizes found by its bisection, samples drawn in its order."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bosch.errors import UserError
from bosch.files import load_json
from data_prep.essays import essay_identity
from data_prep.needles import (
    Needle,
    encode_prompt,
)
from data_prep.words import WordLists, ruler_words

# From here on RULER's own steps are used; below, its smallest haystacks do not fit.
_SHORTEST_LENGTH = 4096
# RULER draws again, for ever, where one step of haystack does not fit.
_REDRAWS = 200


@dataclass(frozen=True)
class Corpus:
    """What samples are made of, beside the seed: prose, words, and a folder with RULER's data."""

    essay: Sequence[str]
    data_dir: Path | None = None
    words: WordLists = field(default_factory=ruler_words)

    @cached_property
    def essay_sha256(self) -> str:
        """SHA-256 of the prose."""
        return str(essay_identity(None, self.essay)["sha256"])


class Draft(NamedTuple):
    """A whole prompt with the beginning of its answer, the correct answers, and what is hidden."""

    text: str
    prefix: str
    answers: list[str]
    needles: list[Needle]


class Sample(NamedTuple):
    """A draft that fits, its token ids, and the sizes of the drafts that led to it."""

    draft: Draft
    ids: list[int]
    sizes: list[int]


class TokenCounter:
    """Counts tokens of prompts without special tokens, as RULER does; counts its calls too."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = len(encode_prompt(tokenizer, ""))
        self._last: tuple[str, list[int]] = ("", [])
        self.calls = 0

    def ids(self, text: str) -> list[int]:
        """The prompt's ids, opening special tokens included."""
        if not text or text != self._last[0]:
            self.calls += 1
            self._last = (text, encode_prompt(self._tokenizer, text))
        return self._last[1]

    def tokens(self, text: str) -> int:
        return len(self.ids(text)) - self._special

    def fits(self, text: str, limit: int, noise: int = 0) -> bool:
        """Whether the text has at most `limit` tokens; tokenised only where it is close.

        `noise`: by how many tokens texts of one length may differ, beside what any text does.
        """
        known, ids = self._last
        if known:
            per_character = len(ids) / len(known)
            more = len(text) - len(known)
            slack = 0.4 * per_character * abs(more) + limit / 256 + 32 + noise
            distance = len(ids) + per_character * more - limit
            if abs(distance) > slack:
                return distance < 0
        return self.tokens(text) <= limit


class RulerTask(ABC):
    """The samples of one task at one length, in order; sample i follows from the draws before it.

    `draw` makes the next draft of a size in haystack units and moves the random state on.
    """

    step: int  # by which RULER shrinks a haystack that does not fit
    smallest = 1
    noise = 0  # tokens by which drafts of one length may differ

    def __init__(
        self, corpus: Corpus, seed: int, length: int, new_tokens: int, counter: TokenCounter
    ) -> None:
        self.corpus, self.seed, self.length, self.new_tokens = corpus, seed, length, new_tokens
        self.counter = counter
        self.is_short = length < _SHORTEST_LENGTH
        self.random = random.Random(seed)
        self.numbers = np.random.RandomState(seed)
        self.size = 0

    @abstractmethod
    def draw(self, index: int, size: int) -> Draft:
        """The next draft of sample `index`, as it is measured while the size is fitted."""

    def draft(self, index: int, size: int) -> Draft:
        """The next draft of sample `index` as it is answered."""
        return self.draw(index, size)

    def fit(self) -> list[int]:
        """Set `size`, the largest haystack that fits by RULER's bisection; returns sizes drawn."""
        return self._bisect(self.length - self.new_tokens)

    def _bisect(self, limit: int) -> list[int]:
        """RULER's bisection from three times what one step's tokens suggest."""
        first = max(self.step, self.smallest)
        per_unit = self.counter.tokens(self.draw(0, first).text) / first
        # Below RULER's lengths a step is so small that the prompt's other text hides its tokens.
        short = self.length if self.is_short else 0
        most = max(int(self.length / per_unit * 3), 2 * first, short)
        return [first, *self._halve(first, most, limit)]

    def _halve(self, low: int, high: int, limit: int) -> list[int]:
        """Set `size` to the largest in [low, high] that has `limit` tokens; returns sizes drawn."""
        sizes, self.size = [], low
        while low <= high:
            middle = (low + high) // 2
            sizes.append(middle)
            if self.counter.fits(self.draw(0, middle).text, limit, self.noise):
                self.size, low = middle, middle + 1
            else:
                high = middle - 1
        return sizes

    def replay(self, fit: Sequence[int], samples: Sequence[Sequence[int]]) -> None:
        """Draw again what `fit` and `sample` drew, without a tokenizer; `size` is to be set."""
        for size in fit:
            self.draw(0, size)
        for index, sizes in enumerate(samples):
            for size in sizes:
                self.draft(index, size)

    def sample(self, index: int) -> Sample:
        """The next sample, `index` of them made before; its haystack shrinks until it fits.

        Raises:
            UserError: not even the shortest haystack fits.
        """
        size, sizes = self.size, []
        while True:
            sizes.append(size)
            draft = self.draft(index, size)
            used = self.counter.tokens(draft.text) + self.new_tokens
            if used <= self.length:
                return Sample(draft, self.counter.ids(draft.text), sizes)
            if size > self.step:
                size -= self.step
            elif sizes.count(size) >= _REDRAWS and size > self.smallest:
                size = max(self.smallest, size // 2)
            elif sizes.count(size) >= _REDRAWS:
                raise UserError(
                    f"it does not fit into {self.length} tokens: its shortest sample has {used}; "
                    "raise the length or leave the task out"
                )

    def _step(self, regular: int, short: int) -> int:
        return max(short, 1) if self.is_short else regular


def read_data(path: Path) -> Any:
    """The JSON content of one of RULER's files. Raises UserError where it is damaged."""
    try:
        return load_json(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: damaged, not JSON ({error}); get the file again") from None
