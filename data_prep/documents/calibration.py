"""The calibration set's prompts: needle questions that the search asks the original model."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from data_prep.tasks.needles import Needle, SeedSpace
from data_prep.tasks.ruler import Corpus, make_rows
from data_prep.tasks.words import OWN_WORDS
from data_prep.text import encode_prompt

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


def write_calibration(
    folder: Path, prompts: Iterable[Prompt], examples: int, tokenizer: Any
) -> dict[str, Any]:
    """Write prompts.jsonl, those after `examples` as spare; returns their sizes in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = []
    with (folder / _PROMPTS).open("w") as file:
        for index, prompt in enumerate(prompts):
            sizes.append(len(encode_prompt(tokenizer, prompt.prompt + prompt.prefix)))
            file.write(json.dumps({**asdict(prompt), "spare": index >= examples}) + "\n")
    return {"shortest": min(sizes), "longest": max(sizes)}


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
    seed = zlib.crc32(f"{space} {seed}".encode())
    rows = {
        task: make_rows(
            task, length, count, seed=seed, new_tokens=new_tokens(task), corpus=corpus,
            tokenizer=tokenizer,
        )
        for task in tasks
    }  # fmt: skip
    for number in range(count):
        task = tasks[number % len(tasks)]
        yield Prompt(task=task, new_tokens=new_tokens(task), **next(rows[task]))


def read_prompts(folder: Path) -> list[Prompt]:
    """The prompts in prepare's calibration folder."""
    with (folder / _PROMPTS).open() as file:
        return [Prompt(**json.loads(line)) for line in file]


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
