"""NoLiMa (arXiv:2502.05167): needles whose questions share no words with them, in shuffled books.

Needle sets (a JSON list of experiments) and books (.txt files) are read in their public layout,
adobe-research/NoLiMa at commit 7532e4e; prompts equal that code's to the character. A task of the
suite is a kind of question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import numpy as np

from bosch.errors import UserError
from bosch.files import load_user_json
from data_prep.text import read_utf8
from stages.evaluate.chat import ChatTemplate, Turns
from stages.evaluate.prompt_suite import PromptSample
from stages.evaluate.suites.nolima import Nolima

_BASE_SEED = 42
# Upstream's system prompt for every chat model, in place of the needle set's own.
_CHAT_SYSTEM = "You are a helpful assistant"
_MAX_TESTS = 100_000  # of a needle set; public sets have a few hundred
# Minimum distance of a distractor from the needle, as a share of the context.
_FREE_ZONE = 0.2
# In contexts shorter than this a distractor has one of three fixed depths.
_SHORT = 500
# Characters of the book by which a distractor's place is found again, and its offset from their
# start; the second pair is for short contexts. Both as upstream.
_ANCHOR, _SHORT_ANCHOR = (50, 49), (25, 23)


class NeedleTest(NamedTuple):
    """A needle with its question; {CHAR} in both stands for a name that is drawn each time."""

    name: str
    kind: str
    needle: str
    question: str
    distractor: str | None
    template: str
    system_prompt: str
    answers: tuple[str, ...]
    characters: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class NolimaSample:
    """One needle at one depth of one book; character and distractor_depth are drawn for it."""

    test: NeedleTest
    book: int
    depth: float
    character: str
    distractor_depth: float

    @property
    def answers(self) -> tuple[str, ...]:
        """An output is right if it contains any of them."""
        return (self.character,) if self.character else self.test.answers

    def check_room(self, book: Book, length: int) -> None:
        """Raise UserError when the book is too short for a prompt with `length` tokens of it."""
        book.span(length, self.depth)
        if self.test.distractor is not None:
            book.span(length, self.distractor_depth)

    def prompt(self, book: Book, length: int) -> str:
        """The prompt with `length` tokens of the book.

        Raises UserError when the book is too short, or a distractor's place is ambiguous in it.
        """
        needle, question = (
            text.replace("{CHAR}", self.character) if self.character else text
            for text in (self.test.needle, self.test.question)
        )
        text = book.with_text(needle, length, self.depth)
        if self.test.distractor is not None:
            text = self._with_distractor(text, self.test.distractor, book, length)
        return self.test.template.format(haystack=text, question=question)

    def _with_distractor(self, text: str, distractor: str, book: Book, length: int) -> str:
        """The text with a distractor where it would stand in the book without the needle."""
        alone = book.with_text(distractor, length, self.distractor_depth)
        characters, offset = _SHORT_ANCHOR if length < _SHORT else _ANCHOR
        at = alone.index(distractor)
        before = alone[max(at - characters, 0) : at - 1]
        if text.count(before) != 1:
            raise UserError(
                f"{book.path}: the text before a distractor appears {text.count(before)} times in "
                f"{length:,} tokens; choose another book"
            )
        place = text.index(before) + offset
        return f"{text[:place]} {distractor}\n{text[place:]}"


class Book:
    """A book in tokens, and the places between its lines."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.path, self._tokenizer = path, tokenizer
        self._ids: list[int] = tokenizer(read_utf8(path), add_special_tokens=False)["input_ids"]
        breaks = {i for i in set(self._ids) if "\n" in tokenizer.decode([i])}
        places = [0, *(place for place, i in enumerate(self._ids) if i in breaks)]
        self._places = np.asarray(places)  # of line breaks, ascending

    def with_text(self, text: str, length: int, depth: float) -> str:
        """`length` tokens of the book, with `text` at the first line break at or after `depth`.

        Raises UserError as `span` does.
        """
        start, place = self.span(length, depth)
        before = self._tokenizer.decode(self._ids[start : place + 1])
        after = self._tokenizer.decode(self._ids[place + 1 : start + length])
        return f"{before[: max(before.rfind(chr(10)), 0)]} {text}\n{after}"

    def span(self, length: int, depth: float) -> tuple[int, int]:
        """Start of `length` tokens, and their first line break at or after `depth`.

        Raises UserError when the book has no such break, or too few tokens around it.
        """
        candidates = self._places[self._places / (length + 1) - depth >= 0]
        place = int(candidates[0]) if len(candidates) else 0
        start = place - int(np.round(length * depth))
        if not len(candidates) or start < 0 or start + length > len(self._ids):
            raise UserError(
                f"{self.path}: its {len(self._ids):,} tokens leave no room for a context of "
                f"{length:,} at depth {depth:.2f}"
            )
        return start, place


def needle_tests(path: Path, default_template: str | None) -> list[NeedleTest]:
    """Every question of every needle of a set, in the file's order.

    Raises UserError when the file is no needle set, or one of its experiments has no template and
    there is no default.
    """
    experiments = load_user_json(path, "get the set again")
    try:
        parsed = (_tests(experiment, default_template) for experiment in experiments)
        tests = list(islice(chain.from_iterable(parsed), _MAX_TESTS + 1))
        if len(tests) > _MAX_TESTS:
            raise ValueError(f"more than {_MAX_TESTS:,} questions")
        if not tests:
            raise ValueError("it has no question")
        name, number = Counter(test.name for test in tests).most_common(1)[0]
        if number > 1:  # one question counted twice would make the interval too narrow
            raise ValueError(f"{name} appears {number} times")
        return tests
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}: not a needle set of NoLiMa: {reason}") from None


def _tests(experiment: Mapping[str, Any], default_template: str | None) -> Iterator[NeedleTest]:
    template = _template(experiment, default_template)
    system = experiment.get("system_prompt", "")
    seed = _BASE_SEED + int(str(experiment["id"])[:4])
    if seed < _BASE_SEED:
        raise ValueError(f"the id {experiment['id']} is no number from 0")
    for kind, question in experiment["questions"].items():
        for name, test in experiment["tests"].items():
            distractor = experiment.get("distractors", {}).get(kind)
            answers = _texts(name, "gold_answers", test.get("gold_answers", ()))
            characters = _texts(name, "character_set", experiment.get("character_set", ()))
            if not (characters if "{CHAR}" in experiment["needle"] else answers):
                raise ValueError(f"{experiment['id']}_{name}_{kind} has no answer")
            _texts(name, "question and needle", [question, experiment["needle"]])
            arguments = test["input_args"]
            is_list = isinstance(arguments, list)  # a string would be iterated letter by letter
            if not is_list or not all(isinstance(value, str) for value in [*arguments, system]):
                raise ValueError(
                    f"input_args of {name} must be a list of texts, system_prompt a text"
                )
            # Upstream fills only the last placeholder of a question or a distractor.
            in_needle, in_question, in_distractor = (
                _placeholders(text, arguments)
                for text in (experiment["needle"], question, distractor or "")
            )
            yield NeedleTest(
                name=f"{experiment['id']}_{name}_{kind}",
                kind=kind,
                needle=_filled(experiment["needle"], in_needle),
                question=_filled(question, in_question[-1:]),
                distractor=_filled(distractor, in_distractor[-1:]) if in_distractor else None,
                template=template,
                system_prompt=system,
                answers=answers,
                characters=characters,
                seed=seed,
            )


def _template(experiment: Mapping[str, Any], default: str | None) -> str:
    """The experiment's template or the default; raises ValueError for other fields than its two."""
    template = experiment.get("task_template")
    if template is None:
        template = default
    if template is None:
        raise ValueError(
            f"experiment {experiment['id']} has no task_template; save the benchmark's own as "
            "task_template.txt beside the set"
        )
    parts = list(Formatter().parse(template))
    fields = {field for _, field, *_ in parts if field is not None}
    # A format specification may ask for any width: {question:>9999999999}.
    plain = all(spec in ("", None) and not conversion for *_, spec, conversion in parts)
    if not plain or fields != {"haystack", "question"}:
        raise ValueError(f"the template of {experiment['id']} has other fields than its two")
    return str(template)


def _texts(name: str, field: str, value: Any) -> tuple[str, ...]:
    """The texts in `value`; raises ValueError for an empty one, which any output contains."""
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{field} of {name} must be texts that are not empty")
    "".join(texts).encode()  # raises UnicodeEncodeError, a ValueError, for half a surrogate pair
    return texts


def _placeholders(text: str, arguments: Sequence[str]) -> list[tuple[str, str]]:
    marks = [("{" + str(number) + "}", value) for number, value in enumerate(arguments, 1)]
    return [(mark, value) for mark, value in marks if mark in text]


def _filled(text: str, placeholders: Sequence[tuple[str, str]]) -> str:
    for mark, value in placeholders:
        text = text.replace(mark, value)
    return text


def samples_of(
    tests: Sequence[NeedleTest], books: int, depths: int, length: int
) -> list[NolimaSample]:
    """Every needle at every depth of every book: books first, then tests, then depths.

    Draws come from numpy's legacy generator, seeded by test and book, as upstream.
    """
    samples = []
    for book in range(books):
        for test in tests:
            rng = np.random.RandomState(test.seed + book)
            for percent in np.linspace(0, 100, depths):
                depth, character = float(percent) / 100, ""
                if "{CHAR}" in test.needle:
                    character = str(rng.choice(list(test.characters)))
                distractor_depth = 0.0
                if test.distractor is not None:
                    distractor_depth = _distractor_depth(rng, depth, length)
                samples.append(NolimaSample(test, book, depth, character, distractor_depth))
    return samples


def _distractor_depth(rng: np.random.RandomState, depth: float, length: int) -> float:
    """A random depth away from the needle; in a short context one of three fixed depths."""
    left, right = max(0, depth - 2 * _FREE_ZONE), max(0, 1 - (depth + 2 * _FREE_ZONE))
    drawn = float(rng.uniform(0, left + right))
    if length < _SHORT:
        if depth < 0.6:
            return 0.7
        return 0.6 if depth > 0.75 else 0.5
    return depth + _FREE_ZONE + (drawn - left) if drawn > left else drawn + _FREE_ZONE


def score(output: str, answers: Sequence[str]) -> float:
    """1 if the output contains one of the answers in the same case, else 0."""
    return float(any(answer in output for answer in answers))


def samples(
    section: Nolima, tokenizer: Any, seed: int, chat: ChatTemplate | None
) -> Iterator[PromptSample]:
    """The needles of the set at every depth of every book, or `section.samples` of them.

    All depths of a question count as one sample, since a model that answers at one depth does so at
    most others. Raises UserError when the needle set or a book cannot be read, or a book is too
    short.
    """
    folder = Path(section.data_dir)
    template_file = folder / "task_template.txt"
    template = read_utf8(template_file).removesuffix("\n") if template_file.is_file() else None
    tests = needle_tests(folder / section.needle_set, template)
    books = [Book(path, tokenizer) for path in section.books(folder)]
    chat_system = None
    if chat is not None:
        chat_system = _CHAT_SYSTEM if _takes_system(chat) else ""
    for length in section.lengths:
        all_samples = samples_of(tests, len(books), section.depths, length)
        rng = np.random.default_rng([seed, length])
        chosen = rng.permutation(len(all_samples))[: section.samples]
        for index in sorted(chosen.tolist()):
            sample = all_samples[index]
            sample.check_room(books[sample.book], length)  # before any model is loaded
            system = sample.test.system_prompt if chat_system is None else chat_system
            yield PromptSample(
                sample.test.kind,
                length,
                answers=sample.answers,
                document=sample.test.name,
                turns=partial(_turns, system, sample, books[sample.book], length),
                new_tokens=section.max_new_tokens,
                score=partial(score, answers=sample.answers),
            )


def _takes_system(chat: ChatTemplate) -> bool:
    """Whether the template accepts a system turn; Gemma's does not."""
    try:
        chat.text([{"role": role, "content": _CHAT_SYSTEM} for role in ("system", "user")])
    except UserError:
        return False
    return True


def _turns(system: str, sample: NolimaSample, book: Book, length: int) -> Turns:
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": sample.prompt(book, length)}]
