"""The calibration set: teacher-forced needle examples, and a record of their needles."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from bosch.progress import progress
from data_prep.haystacks import make_samples
from data_prep.needles import Needle, NeedleSample, SeedSpace, forced_ids


def write_calibration(
    folder: Path,
    *,
    tasks: Sequence[str],
    examples: int,
    length: int,
    seed: int,
    tokenizer: Any,
    essay_words: Sequence[str],
    questions_per_haystack: int = 1,
) -> dict[str, Any]:
    """Write calibration.jsonl (token ids) and needles.jsonl (what is hidden in each example).

    Tasks take turns. A record of calibration.jsonl holds task, index, seed, input_ids and
    answer_length: the last `answer_length` ids are the answer; where several questions are asked
    about one haystack, also shared_length: the first ids, which all of them have. Returns
    statistics.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = []
    made = forced_records(
        tasks, examples, length, "calibration", seed, tokenizer, essay_words, questions_per_haystack
    )
    with (
        (folder / "calibration.jsonl").open("w") as ids_file,
        (folder / "needles.jsonl").open("w") as needles_file,
        progress(examples, "calibration examples", "examples") as bar,
    ):
        for sample, (ids, answer_length, shared_length) in made:
            lengths.append(len(ids))
            head = {"task": sample.task, "index": sample.index, "seed": seed}
            record = {**head, "input_ids": ids, "answer_length": answer_length}
            if shared_length:
                record["shared_length"] = shared_length
            ids_file.write(json.dumps(record) + "\n")
            needles = {"needles": sample.needles, "prompt_sha256": _digest(sample.prompt)}
            needles_file.write(json.dumps({**head, **needles}) + "\n")
            bar.update()
    return {
        "tasks": list(tasks),
        "examples": examples,
        "questions_per_haystack": questions_per_haystack,
        "length": length,
        "shortest": min(lengths),
        "longest": max(lengths),
    }


def forced_records(
    tasks: Sequence[str],
    examples: int,
    length: int,
    seed_space: SeedSpace,
    seed: int,
    tokenizer: Any,
    essay_words: Sequence[str],
    questions_per_haystack: int = 1,
) -> Iterator[tuple[NeedleSample, tuple[list[int], int, int]]]:
    """Teacher-forced examples: the sample, and its ids, answer length and ids shared by a haystack.

    Prompt and answer together have at most `length` tokens. `questions_per_haystack` examples in a
    row ask for different needles of one haystack, the last haystack perhaps for fewer; haystacks
    take tasks in turn. What their prompts share is found in their ids, so that they may be
    tokenised each by itself; the last id of a prompt is never shared.
    """
    for number, first in enumerate(range(0, examples, questions_per_haystack)):
        samples = make_samples(
            tasks[number % len(tasks)], length, tokenizer, seed_space, seed, number, None,
            essay_words, questions_per_haystack,
        )[: examples - first]  # fmt: skip
        forced = [forced_ids(sample, tokenizer) for sample in samples]
        shared = _common_start([prompt[:-1] for prompt, _ in forced]) if len(forced) > 1 else 0
        for sample, (prompt, answer) in zip(samples, forced, strict=True):
            yield sample, (prompt + answer, len(answer), shared)


def _common_start(sequences: list[list[int]]) -> int:
    """Number of first ids that all `sequences` have."""
    columns = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*sequences, strict=False))
    return sum(1 for _ in columns)


def _digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


@dataclass(frozen=True)
class CalibrationNeedles:
    """What evaluation must not ask about."""

    pairs: frozenset[Needle]
    prompts: frozenset[str]

    @classmethod
    def load(cls, folder: Path) -> CalibrationNeedles:
        """Read needles.jsonl of prepare's calibration folder."""
        pairs: set[Needle] = set()
        prompts: set[str] = set()
        with (folder / "needles.jsonl").open() as file:
            for line in file:
                record = json.loads(line)
                pairs.update((key, value) for key, value in record["needles"])
                prompts.add(record["prompt_sha256"])
        return cls(frozenset(pairs), frozenset(prompts))

    def check(self, samples: Iterable[NeedleSample]) -> None:
        """Raise RunError if a sample shares a needle or its prompt with the calibration set."""
        for sample in samples:
            shared = self.pairs.intersection(sample.needles)
            if shared or _digest(sample.prompt) in self.prompts:
                what = f"the needle {min(shared)}" if shared else "its whole prompt"
                raise RunError(
                    f"evaluation sample {sample.task} {sample.index} shares {what} with the "
                    "calibration set: the score would be no held-out score"
                )
