"""Plain English words, needle keys (`adjective-noun`) made from them, and sentences of a text.

The adjectives and the nouns of words.txt are sorted; samples depend on their order, so changing a
list changes every needle sample. RULER's words come from the package wonderwords, and its sentence
splitter is NLTK's punkt; both are used if they are installed.
"""

from __future__ import annotations

import importlib.metadata
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

ADJECTIVES, NOUNS = (
    tuple(words.split()) for words in Path(__file__).with_suffix(".txt").read_text().split("\n\n")
)


def word_key(rng: Random) -> str:
    """A key like `quiet-harbor`; two draws from `rng`."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


class PairedWords(Sequence[str]):
    """All `adjective-noun` in alphabetical order, made lazily: wonderwords has six million."""

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self._nouns = sorted(set(nouns))
        # Pairs of two adjectives interleave only if one is a prefix of the other (high-,
        # high-pitched-).
        blocks: list[list[str]] = []
        for head in sorted({f"{adjective}-" for adjective in adjectives}):
            if blocks and head.startswith(blocks[-1][0]):
                blocks[-1].append(head)
            else:
                blocks.append([head])
        self._blocks = [
            sorted({h + n for h in heads for n in self._nouns}) if len(heads) > 1 else heads[0]
            for heads in blocks
        ]
        sizes = (len(self._nouns if isinstance(b, str) else b) for b in self._blocks)
        self._ends = list(accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        number = bisect_right(self._ends, index) - 1
        block, at = self._blocks[number], index - self._ends[number]
        return block + self._nouns[at] if isinstance(block, str) else block[at]


@dataclass(frozen=True)
class WordLists:
    """Words of RULER's tasks: keys of needles, and single words in alphabetical order.

    `upstream` names the package of RULER's own; empty for others.
    """

    keys: Sequence[str]
    single: Sequence[str]
    upstream: str = ""


OWN_WORDS = WordLists(PairedWords(ADJECTIVES, NOUNS), sorted({*ADJECTIVES, *NOUNS}))


@lru_cache
def ruler_words() -> WordLists:
    """The words of wonderwords if it is installed, else those of words.txt."""
    try:
        from wonderwords.random_word import _get_words_from_text_file as load
    except ImportError:
        return OWN_WORDS
    nouns, adjectives, verbs = (load(f"{kind}list.txt") for kind in ("noun", "adjective", "verb"))
    single = sorted({*nouns, *adjectives, *verbs})
    name = f"wonderwords {importlib.metadata.version('wonderwords')}"
    return WordLists(PairedWords(adjectives, nouns), single, name)


# White space after a full stop (and a closing quote or bracket), before a new sentence; not after
# the stop of an initial.
_SENTENCE_END = re.compile(
    r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))(?<!\b[A-Za-z]\.)\s+(?=["'(\[]?[A-Z0-9])"""
)


def split_by_rule(text: str) -> list[str]:
    """The sentences of a text, without the white space between them."""
    return _SENTENCE_END.split(text)


@lru_cache
def sentence_splitter() -> tuple[Callable[[str], list[str]], str]:
    """RULER's splitter of a text into sentences if its data is here, else the rule; its name."""
    try:
        import nltk

        nltk.data.find("tokenizers/punkt_tab/english")
    except (ImportError, LookupError):
        return split_by_rule, "built in"
    return nltk.sent_tokenize, f"punkt of nltk {nltk.__version__}"
