"""Synthetic documents that can only be predicted by looking far back.

They teach (or preserve) retrieval in a small model: key-value lists queried in another
order, needles with questions, spans that come again, two-hop look-ups. A document is a list of
segments, so that a trainer can weight what has to be retrieved; joined, it is plain text.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from data_prep.needles import (
    NOISE_LINE,
    answer_prefix,
    instruction,
    needle_sentence,
    pair_owner,
    question,
)
from data_prep.words import ADJECTIVES, NOUNS, word_key


class Segment(NamedTuple):
    """A piece of text; `is_answer` if it repeats something that stood earlier in the document."""

    text: str
    is_answer: bool = False


Document = list[Segment]


def _digits(rng: Random, count: int) -> str:
    return "".join(rng.choice(string.digits) for _ in range(count))


def _hex(rng: Random, count: int) -> str:
    return "".join(rng.choice("0123456789abcdef") for _ in range(count))


_KEYS: tuple[Callable[[Random], str], ...] = (
    word_key,
    word_key,
    word_key,
    lambda rng: rng.choice(NOUNS),
    lambda rng: _hex(rng, rng.randint(3, 6)),
    lambda rng: _digits(rng, rng.randint(2, 4)),
)
_VALUES: tuple[Callable[[Random], str], ...] = (
    lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    lambda rng: _digits(rng, rng.randint(1, 6)),
    lambda rng: _hex(rng, rng.randint(3, 8)),
    lambda rng: rng.choice(ADJECTIVES),
    word_key,
)
_SEPARATORS = (": ", " = ", " -> ", " is: ", " ", ", ")
_LINE_ENDS = ("\n", "; ", ".\n", " | ")


def key_value_list(rng: Random, characters: int) -> Document:
    """Pairs of distinct keys and values, then the keys in random order with values to recall."""
    make_key, make_value = rng.choice(_KEYS), rng.choice(_VALUES)
    separator, end = rng.choice(_SEPARATORS), rng.choice(_LINE_ENDS)
    pairs: dict[str, str] = {}
    length = 0
    limit = characters * rng.uniform(0.2, 0.6)
    for _ in range(characters):
        key = make_key(rng)
        pairs.setdefault(key, make_value(rng))
        length += len(key) + len(separator) + len(pairs[key]) + len(end)
        if length >= limit:
            break
    document = [Segment(f"{key}{separator}{value}{end}") for key, value in pairs.items()]
    document.append(Segment("\n"))
    while length < characters:
        for key in rng.sample(list(pairs), len(pairs)):
            document += [Segment(key + separator), Segment(pairs[key], True), Segment(end)]
            length += len(key) + len(separator) + len(pairs[key]) + len(end)
            if length >= characters:
                break
    return document


def two_hops(rng: Random, characters: int) -> Document:
    """Keys that point to other keys, which hold values; queries for the value behind a pointer."""
    lines, answers = [], []
    length = 0
    limit = characters * rng.uniform(0.3, 0.6)
    while length < limit:
        start, middle, value = word_key(rng), word_key(rng), _digits(rng, 4)
        lines += [f"{start} points to {middle}.\n", f"{middle} holds {value}.\n"]
        answers.append((start, middle, value))
        length += len(lines[-1]) + len(lines[-2])
    rng.shuffle(lines)
    document = [Segment(line) for line in lines]
    while length < characters:
        start, middle, value = rng.choice(answers)
        document += [Segment(f"By {start} we reach "), Segment(middle, True), Segment(" with ")]
        document += [Segment(value, True), Segment(".\n")]
        length += len(start) + len(middle) + len(value) + 25
    return document


def repeated_spans(rng: Random, characters: int, prose: Sequence[str]) -> Document:
    """Prose in which spans of earlier words come again."""
    words: list[str] = []
    document: Document = []
    length = 0
    while length < characters:
        fresh = _prose_words(rng, prose, rng.randint(20, 80))
        document.append(Segment(" ".join(fresh) + "\n"))
        words += fresh
        start = rng.randrange(len(words))
        again = words[start : start + rng.randint(8, 40)]
        document += [Segment(again[0] + " "), Segment(" ".join(again[1:]), True), Segment("\n")]
        length += sum(len(word) + 1 for word in fresh + again)
    return document


def _prose_words(rng: Random, prose: Sequence[str], count: int) -> list[str]:
    start = rng.randrange(max(1, len(prose) - count))
    return list(prose[start : start + count])


def needle_document(rng: Random, characters: int, prose: Sequence[str]) -> Document:
    """Needles in prose, in noise or among other needles, and a few questions about them.

    The form is that of the RULER tasks, so that a small base model can answer them.
    """
    what = "uuids" if rng.random() < 0.1 else "numbers"
    questions = max(1, min(rng.randint(1, 12), characters // 500))
    room = characters - questions * len(question("a" * 12, what) + answer_prefix("a" * 12, what))
    haystack = rng.choice(("noise", "essay", "essay", "needles", "needles"))
    needles: dict[str, str] = {}

    def add_needle() -> str:
        while True:
            key = word_key(rng)
            value = str(rng.randint(1_000_000, 9_999_999)) if what == "numbers" else _uuid(rng)
            # Calibration and evaluation ask for other pairs: nothing here can give them away.
            if key not in needles and pair_owner(key, value) == "training":
                needles[key] = value
                return needle_sentence(key, value, what)

    lines: list[str] = []
    length = 0
    sparse = rng.choice((1, 1, 4, 8))
    while length < room or not lines:
        if haystack == "needles":
            lines.append(add_needle())
        elif haystack == "noise":
            lines.append(NOISE_LINE)
        else:
            lines.append(" ".join(_prose_words(rng, prose, rng.randint(8, 25))))
        length += len(lines[-1]) + 1
    if haystack != "needles":
        for _ in range(sparse):
            lines.insert(rng.randint(0, len(lines)), add_needle())
    joint = " " if haystack == "essay" else "\n"
    document = [Segment(instruction(what) + "\n"), Segment(joint.join(lines))]
    for _ in range(questions):
        key = rng.choice(list(needles))
        document.append(Segment("\n" + question(key, what) + answer_prefix(key, what) + ": "))
        document += [Segment(needles[key], True), Segment(".")]
    return document


def _uuid(rng: Random) -> str:
    return "-".join(_hex(rng, count) for count in (8, 4, 4, 4, 12))


_KINDS = ("list", "needle", "repeat", "hops")
# Shares of the documents in a source of training data: mostly what the needle tasks ask for.
_SOURCE_WEIGHTS = (0.1, 0.8, 0.05, 0.05)


def retrieval_document(
    rng: Random,
    characters: int,
    prose: Sequence[str],
    weights: Sequence[float] = (0.4, 0.4, 0.1, 0.1),
) -> Document:
    """One document of about `characters` characters; `weights`: list, needle, repeat, two hops."""
    kind = rng.choices(_KINDS, weights)[0]
    if kind == "list":
        return key_value_list(rng, characters)
    if kind == "needle":
        return needle_document(rng, characters, prose)
    if kind == "repeat":
        return repeated_spans(rng, characters, prose)
    return two_hops(rng, characters)


def retrieval_documents(
    seed: int, prose: Sequence[str], characters: tuple[int, int] = (500, 4000)
) -> Iterator[str]:
    """An endless stream of documents as text, of lengths drawn between `characters`' two ends."""
    rng = Random(f"retrieval-{seed}")
    while True:
        document = retrieval_document(rng, rng.randint(*characters), prose, _SOURCE_WEIGHTS)
        yield "".join(segment.text for segment in document)
