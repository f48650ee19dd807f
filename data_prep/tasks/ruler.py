"""RULER's thirteen tasks, with the same random draws as NVIDIA/RULER at commit c3f5e3b.

With RULER's words (the package wonderwords), sentence splitter (NLTK's punkt) and essays, a task of
at least 4,096 tokens has the same samples as RULER for the seed. docs/guide/evaluate.md lists the
differences.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bosch.errors import UserError
from bosch.files import load_user_json, write_text
from data_prep.tasks.needles import (
    NOISE_LINE,
    Draft,
    SeedSpace,
    draw_value,
    instruction,
    needle_sentence,
    pair_owner,
    question,
)
from data_prep.tasks.questions import read_questions
from data_prep.tasks.tables import DATA_FILES, RULER_NEEDLES, TaskSpec
from data_prep.tasks.words import WordLists, ruler_words, sentence_splitter, split_by_rule
from data_prep.text import token_counter

# Places of a needle, in percent of an essay's sentences.
_DEPTHS = [round(100 * number / 39) for number in range(40)]
_CHAIN_HOPS = 4
_COMMON_WORDS = 10
# From this length on RULER's steps are used; below it, its smallest haystacks do not fit.
SHORTEST_LENGTH = 4096
# If the smallest haystack does not fit, RULER draws again, forever.
_REDRAWS = 200


@dataclass(frozen=True)
class Corpus:
    """Material of samples: prose, words, and a folder with RULER's data; and whose needles."""

    essay: Sequence[str]
    data_dir: Path | None = None
    words: WordLists = field(default_factory=ruler_words)
    space: SeedSpace = "evaluation"


class RulerTask(ABC):
    """The samples of a task at a length, in order; sample i depends on the draws before it.

    `draw` makes the next draft of a size, in haystack units, and advances the random state.
    """

    step: int  # RULER's decrement for a haystack that does not fit
    smallest = 1

    def __init__(
        self, corpus: Corpus, seed: int, length: int, new_tokens: int, tokens: Callable[[str], int]
    ) -> None:
        self.corpus, self.seed, self.length, self.new_tokens = corpus, seed, length, new_tokens
        self.tokens = tokens  # of a text
        self.is_short = length < SHORTEST_LENGTH
        self.random = random.Random(seed)
        self.numbers = np.random.RandomState(seed)
        self.size = 0

    @abstractmethod
    def draw(self, index: int, size: int) -> Draft:
        """The next draft of sample `index`, with which the size is fitted."""

    def draft(self, index: int, size: int) -> Draft:
        """The next prompt of sample `index`; for vt with a worked example before the draft."""
        return self.draw(index, size)

    def fit(self) -> None:
        """Set `size` to the largest that fits, by RULER's bisection."""
        self._bisect(self.length - self.new_tokens)

    def _bisect(self, limit: int) -> None:
        """RULER's bisection, up to three times the size that the tokens of one step suggest."""
        first = max(self.step, self.smallest)
        per_unit = self.tokens(self.draw(0, first).text) / first
        # Below RULER's lengths a step is small compared with the other text of the prompt.
        short = self.length if self.is_short else 0
        most = max(int(self.length / per_unit * 3), 2 * first, short)
        self._halve(first, most, limit)

    def _halve(self, low: int, high: int, limit: int) -> None:
        """Set `size` to the largest in [low, high] whose draft has at most `limit` tokens.

        `low` if there is none.
        """
        self.size = low
        while low <= high:
            middle = (low + high) // 2
            if self.tokens(self.draw(0, middle).text) <= limit:
                self.size, low = middle, middle + 1
            else:
                high = middle - 1

    def sample(self, index: int) -> Draft:
        """The next sample, number `index`; its haystack shrinks until it fits.

        Raises UserError if not even the shortest haystack fits.
        """
        size, redraws = self.size, 0
        while redraws < _REDRAWS:
            draft = self.draft(index, size)
            tokens = self.tokens(draft.text) + self.new_tokens
            if tokens <= self.length:
                return draft
            if size > max(self.step, self.smallest):
                size = max(self.smallest, size - self.step)
            else:
                redraws += 1
        raise self._too_short(tokens)

    def _too_short(self, tokens: int) -> UserError:
        return UserError(
            f"it does not fit into {self.length} tokens: its shortest sample has {tokens}; raise "
            "the length or leave the task out"
        )

    def _step(self, regular: int, short: int) -> int:
        return max(short, 1) if self.is_short else regular


class NeedleTask(RulerTask):
    """Needles in noise, in prose or among other needles."""

    def __init__(self, spec: TaskSpec, *args: Any) -> None:
        super().__init__(*args)
        self.spec = spec
        is_essay = spec.haystack == "essay"
        self.smallest = 1 if is_essay else spec.keys
        steps = (500, self.length // 64) if is_essay else (25, self.length // 1024)
        self.step = max(self.smallest, self._step(*steps))

    def draw(self, index: int, size: int) -> Draft:
        spec, rng = self.spec, self.random
        keys: list[str] = []
        pairs: list[tuple[str, str]] = []
        for _ in range(spec.keys):
            keys.append(self._draw_key(keys))
            pairs += [(keys[-1], self._draw_value(keys[-1])) for _ in range(spec.values)]
        needles = [needle_sentence(key, value, spec.value) for key, value in pairs]
        random.Random(self.seed).shuffle(needles)
        if spec.haystack == "essay":
            # RULER's haystacks start with the essay's first word, the others anywhere.
            is_ruler, essay = self.corpus.space == "evaluation", self.corpus.essay
            sentences = self._sentences(0 if is_ruler else rng.randrange(len(essay)), size)
            depths = rng.sample(_DEPTHS, len(needles))
            places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
            texts = []
            for begin, place, needle in zip([0, *places], places, needles, strict=False):
                texts += [" ".join(sentences[begin:place]), needle]
            context = " ".join([*texts, " ".join(sentences[places[-1] :])])
        else:
            lines = [NOISE_LINE] * size
            if spec.haystack == "needles":
                others = ((key := self._draw_key(keys), self._draw_value(key)) for _ in lines)
                lines = [needle_sentence(key, value, spec.value) for key, value in others]
            context = "\n".join(_hide(needles, lines, rng.sample(range(size), len(needles))))
        chosen = rng.sample(range(spec.keys), spec.queries)
        per_key = spec.values
        answers = [value for at in chosen for _, value in pairs[at * per_key : (at + 1) * per_key]]
        asked = [keys[at] for at in chosen]
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        kind, many = spec.value, spec.queries * spec.values > 1
        text, prefix = question(query, kind, many)
        text = f"{instruction(kind, many)}\n{context}\n{text}{prefix}"
        return Draft(text, prefix, answers, pairs)

    def _draw_key(self, used_keys: Sequence[str]) -> str:
        """A key; with the few built-in words one that is not used yet."""
        if self.spec.key == "uuids":
            return draw_value(self.random, "uuids")
        words = self.corpus.words
        draws = iter(lambda: self.random.choice(words.keys), None)
        return next(key for key in draws if words.upstream or key not in used_keys)

    def _draw_value(self, key: str) -> str:
        """A value; with the built-in words one that belongs to the corpus's seed space."""
        upstream, space = self.corpus.words.upstream, self.corpus.space
        draws = iter(lambda: draw_value(self.random, self.spec.value), None)
        return next(value for value in draws if upstream or pair_owner(key, value) == space)

    @lru_cache(maxsize=4)  # noqa: B019 - a task's samples have two or three sizes
    def _sentences(self, start: int, size: int) -> list[str]:
        """Sentences of `size` words from `start`; the essay is repeated where it ends."""
        words = itertools.islice(itertools.cycle(self.corpus.essay), start, start + size)
        # The calibration set does not depend on what is installed.
        is_ruler = self.corpus.space == "evaluation"
        split = sentence_splitter()[0] if is_ruler else split_by_rule
        return split(" ".join(words))


def _hide(needles: Sequence[str], texts: list[str], places: Sequence[int]) -> list[str]:
    """Insert the needles into `texts` at these places, the first one at the last place."""
    for place, needle in zip(sorted(places, reverse=True), needles, strict=True):
        texts.insert(place, needle)
    return texts


def _distinct(draw: Callable[[], str], count: int) -> list[str]:
    """The first `count` different draws."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw()] = None
    return list(drawn)


class VariableTracking(RulerTask):
    """A chain of assignments in noise, after one worked example of another chain."""

    smallest = _CHAIN_HOPS + 1
    _EXAMPLE_LENGTH, _EXAMPLE_VALUE = 500, "12345"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._example = ""
        length, new_tokens = self.length, self.new_tokens
        self.length, self.new_tokens = min(self._EXAMPLE_LENGTH, length // 2), 0
        self.step = 5
        self._bisect(self.length)
        draft = self.sample(0)
        self._example = f"{draft.text} {' '.join(draft.answers)}\n"
        self._example_names = draft.answers
        self.length, self.new_tokens = length, new_tokens
        self.step = self._step(10, self.length // 1024)

    def fit(self) -> None:
        example = self.tokens(self._example)
        self._bisect(self.length - self.new_tokens - example)

    def draw(self, index: int, size: int) -> Draft:
        names, chain = self._chain()
        value = chain[0].split("=")[-1].strip()
        places = self.random.sample(range(size), len(chain))
        lines = _hide(chain[::-1], [NOISE_LINE] * size, places)
        context = "\n".join(lines).replace(". \n", ".\n")
        prefix = (
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{_CHAIN_HOPS + 1} variables are assigned the value {value}, they are: "
        )
        text = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
            f"\n\n{context}\nQuestion: Find all variables that are assigned the value {value} in "
            f"the text above.{prefix}"
        )
        return Draft(text, prefix, names, [])

    def draft(self, index: int, size: int) -> Draft:
        draft = self.draw(index, size)
        return draft._replace(text=self._renamed_example() + draft.text) if self._example else draft

    def _renamed_example(self) -> str:
        """The worked example with new names and a new value."""
        example = self._example
        for name in self._example_names:
            example = example.replace(name, self._name(len(name)))
        value = str(self.numbers.randint(10000, 99999))
        return example.replace(self._EXAMPLE_VALUE, value) + "\n"

    def _chain(self) -> tuple[list[str], list[str]]:
        letters = 5 if self._example else 3
        names = _distinct(lambda: self._name(letters), _CHAIN_HOPS + 1)
        value = str(self.numbers.randint(10000, 99999)) if self._example else self._EXAMPLE_VALUE
        links = [f"VAR {name} = VAR {earlier} " for earlier, name in itertools.pairwise(names)]
        return names, [f"VAR {names[0]} = {value}", *links]

    def _name(self, letters: int) -> str:
        return "".join(self.random.choices(string.ascii_uppercase, k=letters))


class CommonWords(RulerTask):
    """A numbered list of words in which ten are far more frequent, after a worked example."""

    step = 10
    smallest = _COMMON_WORDS
    _PREFIX = " Answer: The top 10 words that appear most often in the list are:"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._words = list(self.corpus.words.single)
        random.Random(self.seed).shuffle(self._words)
        self._more_words = self._english_words()
        self._available = max(len(self._words), len(self._more_words))

    def fit(self) -> None:
        """As `RulerTask.fit`; raises UserError if there are too few words for the length."""
        first = min(4096, self._available)
        per_word = self.tokens(self.draw(0, first).text) / first
        low, high = self.step, max(int(self.length // per_word) * 2, 2 * self.step)
        self._halve(low, min(high, self._available), self.length - self.new_tokens)
        if self.size == self._available:
            is_fallback = not self.corpus.words.upstream
            package = "install the package wonderwords, and " if is_fallback else ""
            raise UserError(
                f"there are {self._available:,} different words, too few for {self.length:,} "
                f"tokens: {package}name the folder with RULER's {DATA_FILES['cwe']} as data_dir"
            )

    def draw(self, index: int, size: int) -> Draft:
        example = self._list(20, 3, 1) if self.is_short else self._list(40, 10, 3)
        context, answers = self._list(size, 6, 1) if self.is_short else self._list(size, 30, 3)
        text = f"{self._prompt(example[0])} {_numbered(example[1])}\n{self._prompt(context)}"
        return Draft(text, self._PREFIX, answers, [])

    def _prompt(self, context: str) -> str:
        return (
            "Below is a numbered list of words. In these words, some appear more often than "
            f"others. Memorize the ones that appear most often.\n{context}\nQuestion: What are the "
            f"10 most common words in the above list?{self._PREFIX}"
        )

    def _list(self, count: int, often: int, seldom: int) -> tuple[str, list[str]]:
        words = self.random.sample(
            self._words if count <= len(self._words) else self._more_words, count
        )
        common, rare = words[:_COMMON_WORDS], words[_COMMON_WORDS:]
        listed = common * often + rare * seldom
        random.Random(self.seed).shuffle(listed)
        return _numbered(listed), common

    def _english_words(self) -> list[str]:
        folder = self.corpus.data_dir
        path = folder / DATA_FILES["cwe"] if folder is not None else None
        if path is None or not path.is_file():
            return []
        content = load_user_json(path, "get the file again")
        if not isinstance(content, dict):
            raise UserError(f"{path}: expected a JSON object of words, as RULER has it")
        return [str(word) for word in content.values()]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class FrequentWords(RulerTask):
    """Made-up words whose counts fall with the square of their rank; the first one is noise."""

    _ZETA_2 = math.pi**2 / 6
    _LETTERS = 6
    _PREFIX = (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._limit = self.length - self.new_tokens
        self.step = max(1, self._limit // 32)
        self._vocabulary: list[str] = []

    def fit(self) -> None:
        """Set `size` to the most words below the length, in RULER's steps."""
        size = self._limit // self._LETTERS
        text = self.draw(0, size).text
        while self.tokens(text) < self._limit:
            size += self.step
            text = self._text(size)
        self.size = size - self.step

    def draw(self, index: int, size: int) -> Draft:
        self._vocabulary = sorted(_distinct(self._word, max(self._limit // 50, 4)))
        random.Random(self.seed).shuffle(self._vocabulary)
        self._vocabulary[0] = "..."
        return Draft(self._text(size), self._PREFIX, self._vocabulary[1:4], [])

    def sample(self, index: int) -> Draft:
        draft, size = self.draw(index, self.size), self.size
        while (tokens := self.tokens(draft.text)) > self._limit:
            if size <= self.step:
                raise self._too_short(tokens)
            size -= self.step
            draft = draft._replace(text=self._text(size))
        return draft

    def _text(self, size: int) -> str:
        ranks = np.arange(1, len(self._vocabulary) + 1)
        counts = (size * (ranks**-2.0) / self._ZETA_2).astype(int)
        repeated = map(itertools.repeat, self._vocabulary, counts)
        words = list(itertools.chain.from_iterable(repeated))
        random.Random(self.seed).shuffle(words)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(words)}\nQuestion: Do not "
            "provide any explanation. Please ignore the dots '....'. What are the three most "
            f"frequently appeared words in the above coded text?{self._PREFIX}"
        )

    def _word(self) -> str:
        return "".join(self.random.choices(string.ascii_lowercase, k=self._LETTERS))


class QuestionAnswering(RulerTask):
    """A question on documents among others, from a local file of SQuAD or HotpotQA."""

    _PREFIX = " Answer:"
    _TASK = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words."
    )

    def __init__(self, task: str, *args: Any) -> None:
        super().__init__(*args)
        assert self.corpus.data_dir is not None  # otherwise the task is not run
        path = self.corpus.data_dir / DATA_FILES[task]
        self._questions, self._documents = read_questions(task, path)
        self._path = path
        self.step = self._step(10, 1)

    def draw(self, index: int, size: int) -> Draft:
        if index >= len(self._questions):
            raise UserError(
                f"{self._path}: holds {len(self._questions):,} questions; lower "
                "evaluate.ruler.samples"
            )
        question = self._questions[index]
        relevant, related, every = question.documents, question.related, self._documents
        count = max(size - len(relevant), 0)
        if size >= len(every):
            documents = list(itertools.islice(itertools.cycle(every), size))
        else:
            if count > len(related):
                close = {*relevant, *related}
                unrelated = [at for at in range(len(every)) if at not in close]
                distractors = related + self.random.sample(unrelated, count - len(related))
            else:
                distractors = self.random.sample(related, count)
            documents = [every[at] for at in relevant + distractors]
        random.Random(self.seed).shuffle(documents)
        context = "\n\n".join(f"Document {i}:\n{d}" for i, d in enumerate(documents, 1))
        text = (
            f"{self._TASK}\n\nThe following are given documents.\n\n{context}\n\n{self._TASK}"
            f"\n\nQuestion: {question.text}{self._PREFIX}"
        )
        return Draft(text, self._PREFIX, question.answers, [])


def ruler_task(
    task: str, corpus: Corpus, seed: int, length: int, new_tokens: int, tokens: Callable[[str], int]
) -> RulerTask:
    """The samples of a task at one length.

    Raises UserError if a required file is damaged, or vt's worked example does not fit.
    """
    arguments = (corpus, seed, length, new_tokens, tokens)
    if task in RULER_NEEDLES:
        return NeedleTask(RULER_NEEDLES[task], *arguments)
    if task in ("qa_1", "qa_2"):
        return QuestionAnswering(task, *arguments)
    classes: dict[str, Callable[..., RulerTask]] = {
        "vt": VariableTracking, "cwe": CommonWords, "fwe": FrequentWords
    }  # fmt: skip
    return classes[task](*arguments)


def make_rows(
    task: str,
    length: int,
    count: int,
    *,
    seed: int,
    new_tokens: int,
    corpus: Corpus,
    tokenizer: Any,
) -> Iterator[dict[str, Any]]:
    """Samples whose prompt and answer fit into `length` tokens.

    The model continues `prompt` and `prefix`, the beginning of the answer; `answers` are the texts
    to look for, `needles` the hidden pairs. Raises UserError if the task does not fit, or a
    required file is missing or damaged.
    """
    try:
        counter = token_counter(tokenizer)
        samples = ruler_task(task, corpus, seed, length, new_tokens, counter)
        samples.fit()
        for index in range(count):
            row = samples.sample(index)._asdict()
            prompt = row.pop("text").removesuffix(row["prefix"])
            yield {"length": length, "prompt": prompt, **row}
    except UserError as fault:
        raise UserError(f"{task} at {length:,} tokens: {fault}") from None


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows where `read_rows` reads them, atomically."""
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
