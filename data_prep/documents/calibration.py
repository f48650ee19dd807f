"""The calibration set's prompts: needle questions that the search asks the original model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from bosch.progress import progress
from data_prep.tasks.needles import Draft, Needle, SeedSpace, make_sample
from data_prep.tasks.tables import PROMPTS_PER_EXAMPLE
from data_prep.text import encode_prompt

_PROMPTS, _NEEDLES = "prompts.jsonl", "needles.jsonl"


@dataclass(frozen=True)
class Prompt:
    """A prompt of `task` fitted into `length` tokens, with `new_tokens` for the answer.

    The model continues `prompt` and `prefix`, the beginning of the answer. A `spare` prompt is
    asked only where others are answered wrongly.
    """

    task: str
    length: int
    new_tokens: int
    prompt: str
    prefix: str
    answers: list[str]
    spare: bool = False


def write_calibration(
    folder: Path,
    *,
    tasks: Sequence[str],
    examples: int,
    length: int,
    new_tokens: Callable[[str], int],
    seed: int,
    tokenizer: Any,
    essay_words: Sequence[str],
) -> dict[str, Any]:
    """Write prompts.jsonl and needles.jsonl (the needles of each prompt); returns statistics."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = []
    count = PROMPTS_PER_EXAMPLE * examples
    prompts = needle_prompts(
        tasks, count, length, new_tokens, "calibration", seed, tokenizer, essay_words
    )
    with (
        (folder / _PROMPTS).open("w") as prompts_file,
        (folder / _NEEDLES).open("w") as needles_file,
        progress(count, "calibration prompts", "prompts") as bar,
    ):
        for index, (draft, prompt) in enumerate(prompts):
            lengths.append(len(encode_prompt(tokenizer, draft.text)))
            record = {**asdict(prompt), "spare": index >= examples}
            prompts_file.write(json.dumps(record) + "\n")
            digest = hashlib.sha256(draft.prompt.encode()).hexdigest()
            record = {"task": prompt.task, "needles": draft.needles, "prompt_sha256": digest}
            needles_file.write(json.dumps(record) + "\n")
            bar.update()
    return {
        "tasks": list(tasks),
        "examples": examples,
        "length": length,
        "shortest": min(lengths),
        "longest": max(lengths),
    }


def needle_prompts(
    tasks: Sequence[str],
    count: int,
    length: int,
    new_tokens: Callable[[str], int],
    seed_space: SeedSpace,
    seed: int,
    tokenizer: Any,
    essay_words: Sequence[str],
) -> Iterator[tuple[Draft, Prompt]]:
    """Needle questions as the evaluation asks them; tasks alternate.

    A prompt and `new_tokens(task)` have at most `length` tokens.
    """
    for number in range(count):
        task = tasks[number % len(tasks)]
        new = new_tokens(task)
        draft = make_sample(task, length, tokenizer, seed_space, seed, number, new, essay_words)
        yield draft, Prompt(task, length, new, draft.prompt, draft.prefix, draft.answers)


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
        """Read needles.jsonl of prepare's calibration folder."""
        with (folder / _NEEDLES).open() as file:
            records = [json.loads(line) for line in file]
        pairs = frozenset((key, value) for record in records for key, value in record["needles"])
        return cls(pairs, frozenset(record["prompt_sha256"] for record in records))

    def check(self, name: str, prompt: str, needles: Iterable[Sequence[str]]) -> None:
        """Raise RunError if the sample `name` shares a needle or its prompt with the set."""
        shared = self.pairs.intersection((key, value) for key, value in needles)
        if shared or hashlib.sha256(prompt.encode()).hexdigest() in self.prompts:
            overlap = f"the needle {min(shared)}" if shared else "its whole prompt"
            raise RunError(
                f"evaluation sample {name} shares {overlap} with the calibration set: the score "
                "would be no held-out score; choose another seed"
            )
