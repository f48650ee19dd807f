"""The calibration set's prompts: needle questions that the search asks the original model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from bosch.files import remove
from data_prep.tasks.needles import Needle, SeedSpace
from data_prep.tasks.ruler import Corpus, make_rows, read_rows, write_rows
from data_prep.tasks.words import OWN_WORDS

_PROMPTS = "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """A prompt of `task` fitted into `length` tokens, with `new_tokens` for the answer.

    The model continues `prompt` and `prefix`, the beginning of the answer; `needles` are the hidden
    pairs. A `spare` prompt is asked only where others are answered wrongly.
    """

    task: str
    length: int
    new_tokens: int
    prompt: str
    prefix: str
    answers: list[str]
    needles: list[Needle] = field(default_factory=list)
    spare: bool = False


def write_calibration(folder: Path, prompts: Iterable[Prompt], examples: int) -> None:
    """Write prompts.jsonl; those after `examples` are spare."""
    remove(folder)  # a killed run leaves a part of a file
    folder.mkdir(parents=True)
    records = (asdict(prompt) | {"spare": i >= examples} for i, prompt in enumerate(prompts))
    write_rows(folder / _PROMPTS, records)


def needle_prompts(
    tasks: Sequence[str],
    count: int,
    length: int,
    new_tokens: Callable[[str], int],
    space: SeedSpace,
    seed: int,
    tokenizer: Any,
    essay_words: Sequence[str],
) -> Iterator[Prompt]:
    """RULER's needle questions with words of our own and needles of a seed space; tasks alternate.

    A prompt and `new_tokens(task)` have at most `length` tokens.
    """
    corpus = Corpus(essay_words, words=OWN_WORDS, space=space)
    rows = {
        task: make_rows(
            task, length, count, seed=zlib.crc32(f"{space} {task} {seed}".encode()),
            new_tokens=new_tokens(task), corpus=corpus, tokenizer=tokenizer,
        )
        for task in tasks
    }  # fmt: skip
    for number in range(count):
        task = tasks[number % len(tasks)]
        yield Prompt(task=task, new_tokens=new_tokens(task), **next(rows[task]))


def read_prompts(folder: Path) -> list[Prompt]:
    """The prompts in prepare's calibration folder."""
    return [Prompt(**row) for row in read_rows(folder / _PROMPTS)]


@dataclass(frozen=True)
class CalibrationNeedles:
    """Needles and prompts of the calibration set, which evaluation must not use."""

    pairs: frozenset[Needle]
    prompts: frozenset[str]

    @classmethod
    def load(cls, folder: Path) -> CalibrationNeedles:
        """Those of prepare's calibration folder."""
        prompts = read_prompts(folder)
        pairs = frozenset((key, value) for prompt in prompts for key, value in prompt.needles)
        return cls(pairs, frozenset(prompt.prompt for prompt in prompts))

    def check(self, name: str, prompt: str, needles: Iterable[Sequence[str]]) -> None:
        """Raise RunError if the sample `name` shares a needle or its prompt with the set."""
        shared = self.pairs.intersection((key, value) for key, value in needles)
        if shared or prompt in self.prompts:
            overlap = f"the needle {min(shared)}" if shared else "its whole prompt"
            raise RunError(
                f"evaluation sample {name} shares {overlap} with the calibration set: the score "
                "would be no held-out score; choose another seed"
            )
