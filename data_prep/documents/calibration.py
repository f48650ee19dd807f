"""The calibration set: teacher-forced needle examples, and a record of their needles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from bosch.progress import progress
from data_prep.tasks.needles import Draft, Needle, SeedSpace, forced_ids, make_sample
from data_prep.tasks.samples import StoredSample


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
    """Write calibration.jsonl (token ids) and needles.jsonl (the needles of each example).

    Tasks alternate. A record of calibration.jsonl holds task, index, seed, input_ids and
    answer_length; the last `answer_length` ids are the answer. Returns statistics.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = []
    records = forced_records(tasks, examples, length, "calibration", seed, tokenizer, essay_words)
    with (
        (folder / "calibration.jsonl").open("w") as ids_file,
        (folder / "needles.jsonl").open("w") as needles_file,
        progress(examples, "calibration examples", "examples") as bar,
    ):
        for index, (sample, (ids, answer_length)) in enumerate(records):
            lengths.append(len(ids))
            common = {"task": tasks[index % len(tasks)], "index": index, "seed": seed}
            record = {**common, "input_ids": ids, "answer_length": answer_length}
            ids_file.write(json.dumps(record) + "\n")
            digest = hashlib.sha256(sample.prompt.encode()).hexdigest()
            needles = {"needles": sample.needles, "prompt_sha256": digest}
            needles_file.write(json.dumps({**common, **needles}) + "\n")
            bar.update()
    return {
        "tasks": list(tasks),
        "examples": examples,
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
    max_new_tokens: int | None = None,
) -> Iterator[tuple[Draft, tuple[list[int], int]]]:
    """Teacher-forced examples: the sample, and its token ids and answer length.

    Tasks alternate. Prompt and answer have at most `length` tokens; with `max_new_tokens`, prompt
    plus `max_new_tokens` have.
    """
    for number in range(examples):
        task = tasks[number % len(tasks)]
        sample = make_sample(
            task, length, tokenizer, seed_space, seed, number, max_new_tokens, essay_words
        )
        prompt, answer = forced_ids(sample, tokenizer)
        yield sample, (prompt + answer, len(answer))


@dataclass(frozen=True)
class CalibrationNeedles:
    """Needles and prompts of the calibration set, which evaluation must not use."""

    pairs: frozenset[Needle]
    prompts: frozenset[str]

    @classmethod
    def load(cls, folder: Path) -> CalibrationNeedles:
        """Read needles.jsonl of prepare's calibration folder."""
        with (folder / "needles.jsonl").open() as file:
            records = [json.loads(line) for line in file]
        pairs = frozenset((key, value) for record in records for key, value in record["needles"])
        return cls(pairs, frozenset(record["prompt_sha256"] for record in records))

    def check(self, sample: StoredSample) -> None:
        """Raise RunError if a sample shares a needle or its prompt with the calibration set."""
        shared = self.pairs.intersection(sample.needles)
        if shared or sample.prompt_sha256 in self.prompts:
            overlap = f"the needle {min(shared)}" if shared else "its whole prompt"
            raise RunError(
                f"evaluation sample {sample.task} {sample.index} shares {overlap} with the "
                "calibration set: the score would be no held-out score; choose another seed"
            )
