"""The calibration set: teacher-forced needle examples, and a record of their needles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from bosch.progress import progress
from data_prep.needles import Needle, NeedleSample, SeedSpace, forced_ids, make_sample


def write_calibration(
    folder: Path,
    *,
    tasks: Sequence[str],
    examples: int,
    length: int,
    seed: int,
    tokenizer: Any,
    essay_words: Sequence[str],
) -> dict[str, Any]:
    """Write calibration.jsonl (token ids) and needles.jsonl (what is hidden in each example).

    Tasks take turns. A record of calibration.jsonl holds task, index, seed, input_ids and
    answer_length: the last `answer_length` ids are the answer. Returns statistics.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = []
    made = forced_examples(tasks, examples, length, "calibration", seed, tokenizer, essay_words)
    with (
        (folder / "calibration.jsonl").open("w") as ids_file,
        (folder / "needles.jsonl").open("w") as needles_file,
        progress(examples, "calibration examples", "examples") as bar,
    ):
        for sample, prompt, answer in made:
            lengths.append(len(prompt) + len(answer))
            head = {"task": sample.task, "index": sample.index, "seed": seed}
            record = {**head, "input_ids": prompt + answer, "answer_length": len(answer)}
            ids_file.write(json.dumps(record) + "\n")
            needles = {"needles": sample.needles, "prompt_sha256": _digest(sample.prompt)}
            needles_file.write(json.dumps({**head, **needles}) + "\n")
            bar.update()
    return {
        "tasks": list(tasks),
        "examples": examples,
        "length": length,
        "shortest": min(lengths),
        "longest": max(lengths),
    }


def forced_examples(
    tasks: Sequence[str],
    examples: int,
    length: int,
    seed_space: SeedSpace,
    seed: int,
    tokenizer: Any,
    essay_words: Sequence[str],
) -> Iterator[tuple[NeedleSample, list[int], list[int]]]:
    """Teacher-forced examples, tasks in turn: the sample, ids of its prompt and of its answer.

    Prompt and answer together have at most `length` tokens.
    """
    for index in range(examples):
        task = tasks[index % len(tasks)]
        sample = make_sample(task, length, tokenizer, seed_space, seed, index, None, essay_words)
        yield sample, *forced_ids(sample, tokenizer)


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
