"""Synthetic documents that can only be predicted by retrieval from far back.

They teach or preserve retrieval in a small model: key-value lists queried in another order, needles
with questions, repeated spans, two-hop look-ups. A document is a list of segments, so that a
trainer can weight the retrieved ones; joined, it is plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Literal, NamedTuple

from data_prep.tasks.needles import (
    NOISE_LINE,
    draw_value,
    instruction,
    needle_sentence,
    pair_owner,
    question,
)
from data_prep.tasks.words import ADJECTIVES, NOUNS, word_key


class Segment(NamedTuple):
    """A piece of text; `is_answer` if it repeats something earlier in the document."""

    text: str
    is_answer: bool = False


Document = list[Segment]


def _letters(rng: Random, alphabet: str, count: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(count))


_DIGITS, _HEX = "0123456789", "0123456789abcdef"
_KEYS: tuple[Callable[[Random], str], ...] = (
    word_key,
    word_key,
    word_key,
    lambda rng: rng.choice(NOUNS),
    lambda rng: _letters(rng, _HEX, rng.randint(3, 6)),
    lambda rng: _letters(rng, _DIGITS, rng.randint(2, 4)),
)
_VALUES: tuple[Callable[[Random], str], ...] = (
    lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    lambda rng: _letters(rng, _DIGITS, rng.randint(1, 6)),
    lambda rng: _letters(rng, _HEX, rng.randint(3, 8)),
    lambda rng: rng.choice(ADJECTIVES),
    word_key,
)
_SEPARATORS = (": ", " = ", " -> ", " is: ", " ", ", ")
_LINE_ENDS = ("\n", "; ", ".\n", " | ")
_EXAMPLE = {"numbers": "1234567", "uuids": "0" * 36}


def key_value_list(rng: Random, characters: int, prose: Sequence[str]) -> Document:
    """Pairs of distinct keys and values, then the keys in random order with values to recall."""
    make_key, make_value = rng.choice(_KEYS), rng.choice(_VALUES)
    separator, end = rng.choice(_SEPARATORS), rng.choice(_LINE_ENDS)
    pairs: dict[str, str] = {}
    length = 1  # the line break between pairs and questions
    limit = characters * rng.uniform(0.2, 0.6)
    # There may be fewer different keys than fit into the list.
    for _ in range(characters):
        key, value = make_key(rng), make_value(rng)
        if key not in pairs:
            pairs[key] = value
            length += len(key) + len(separator) + len(value) + len(end)
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


def two_hops(rng: Random, characters: int, prose: Sequence[str]) -> Document:
    """Keys that point to other keys with values, and queries for the value behind a pointer."""
    lines, answers, keys = [], [], set[str]()
    length = 0
    limit = characters * rng.uniform(0.3, 0.6)
    for _ in range(characters):  # there may be fewer different keys than fit
        start, middle, value = word_key(rng), word_key(rng), _letters(rng, _DIGITS, 4)
        if start == middle or {start, middle} & keys:
            continue  # a key with two lines would have two answers
        keys |= {start, middle}
        lines += [f"{start} points to {middle}.\n", f"{middle} holds {value}.\n"]
        answers.append((start, middle, value))
        length += len(lines[-1]) + len(lines[-2])
        if length >= limit:
            break
    rng.shuffle(lines)
    document = [Segment(line) for line in lines]
    while length < characters:
        start, middle, value = rng.choice(answers)
        document += [Segment(f"By {start} we reach "), Segment(middle, True), Segment(" with ")]
        document += [Segment(value, True), Segment(".\n")]
        length += sum(len(segment.text) for segment in document[-5:])
    return document


def repeated_spans(rng: Random, characters: int, prose: Sequence[str]) -> Document:
    """Prose in which spans of earlier words are repeated."""
    words: list[str] = []
    document: Document = []
    length = 0
    while length < characters:
        # A repeated span is half as long as a new one, and a word has six letters.
        room = max(10, (characters - length) // 10)
        new_words = _prose_words(rng, prose, min(rng.randint(20, 80), room))
        document.append(Segment(" ".join(new_words) + "\n"))
        words += new_words
        start = rng.randrange(len(words))
        copied = words[start : start + min(rng.randint(8, 40), room)]
        document += [Segment(copied[0] + " "), Segment(" ".join(copied[1:]), True), Segment("\n")]
        length += sum(len(word) + 1 for word in new_words + copied)
    return document


def _prose_words(rng: Random, prose: Sequence[str], count: int) -> list[str]:
    start = rng.randrange(max(1, len(prose) - count))
    return list(prose[start : start + count])


def needle_document(rng: Random, characters: int, prose: Sequence[str]) -> Document:
    """Needles in prose, in noise or among other needles, and a few questions about them.

    It has the form of RULER's tasks, so that a small base model can answer them.
    """
    kind: Literal["numbers", "uuids"] = "uuids" if rng.random() < 0.1 else "numbers"
    questions = max(1, min(rng.randint(1, 12), characters // 500))
    intro = instruction(kind) + "\n"
    question_size = sum(map(len, ("\n", *question("a" * 12, kind), ": ", _EXAMPLE[kind], ".")))
    room = characters - len(intro) - questions * question_size
    haystack = rng.choice(("noise", "essay", "essay", "needles", "needles"))
    needles: dict[str, str] = {}

    def add_needle() -> str:
        while True:
            key, value = word_key(rng), draw_value(rng, kind)
            # Calibration and evaluation use other pairs, so nothing leaks.
            if key not in needles and pair_owner(key, value) == "training":
                needles[key] = value
                return needle_sentence(key, value, kind)

    hidden = 0 if haystack == "needles" else min(rng.choice((1, 1, 4, 8)), max(1, room // 100))
    room -= hidden * len(needle_sentence("a" * 12, _EXAMPLE[kind], kind))
    lines: list[str] = []
    length = 0
    while length < room or not lines:
        if haystack == "needles":
            lines.append(add_needle())
        elif haystack == "noise":
            lines.append(NOISE_LINE)
        else:
            lines.append(" ".join(_prose_words(rng, prose, rng.randint(8, 25))))
        length += len(lines[-1]) + 1
    for _ in range(hidden):
        lines.insert(rng.randint(0, len(lines)), add_needle())
    joint = " " if haystack == "essay" else "\n"
    document = [Segment(intro), Segment(joint.join(lines))]
    for _ in range(questions):
        key = rng.choice(list(needles))
        document.append(Segment("\n" + "".join(question(key, kind)) + ": "))
        document += [Segment(needles[key], True), Segment(".")]
    return document


# Shares of the documents in training data: mostly those like the needle tasks.
_SOURCE_WEIGHTS = (0.1, 0.8, 0.05, 0.05)


_MAKERS = key_value_list, needle_document, repeated_spans, two_hops


def retrieval_document(
    rng: Random, characters: int, prose: Sequence[str], weights: Sequence[float] = (4, 4, 1, 1)
) -> Document:
    """One document of about `characters` characters; `weights`: list, needle, repeat, two hops."""
    return rng.choices(_MAKERS, weights)[0](rng, characters, prose)


def retrieval_documents(
    seed: int, prose: Sequence[str], characters: tuple[int, int]
) -> Iterator[str]:
    """An endless stream of documents as text, with random lengths in the range `characters`."""
    rng = Random(f"retrieval-{seed}")
    while True:
        document = retrieval_document(rng, rng.randint(*characters), prose, _SOURCE_WEIGHTS)
        yield "".join(segment.text for segment in document)
