"""The calibration set D: teacher-forced examples whose answers the model must get right."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bosch.errors import UserError

# An id of six digits takes eight bytes with comma and blank; the rest is for other fields.
# A gradient is taken over one of at most this many parts of the set, in turn.
PARTS = 8


@dataclass(frozen=True)
class CalibrationExample:
    """Token ids of prompt and answer; the last `answer_length` ids are the answer."""

    input_ids: tuple[int, ...]
    answer_length: int
    task: str = ""


@dataclass(frozen=True)
class CalibrationSet:
    """The examples on which S(z) is measured."""

    examples: tuple[CalibrationExample, ...]

    @classmethod
    def from_records(cls, records: Iterable[Any]) -> CalibrationSet:
        """From token ids, answer length and any task of each example; ValueError if impossible."""
        examples = []
        for ids, answer_length, *task in records:
            if not 0 < answer_length < len(ids):
                raise ValueError(
                    f"an answer of {answer_length} tokens does not fit an example of {len(ids)}"
                )
            input_ids = tuple(int(i) for i in ids)
            examples.append(CalibrationExample(input_ids, int(answer_length), *task))
        if not examples:
            raise ValueError("it holds no example")
        return cls(tuple(examples))

    @classmethod
    def load(cls, path: Path) -> CalibrationSet:
        """Read a search's `calibration.jsonl`; raises UserError if it is missing or bad."""
        advice = "run the search again with --force search"
        try:
            lines = path.read_bytes().splitlines()
            return cls.from_records(map(_record, filter(bytes.strip, lines)))
        except OSError as error:
            raise UserError(
                f"{path}: cannot read the calibration set ({error.strerror}); {advice}"
            ) from error
        except (ValueError, RecursionError) as error:
            message = f"{path}: the calibration set is damaged ({error}); {advice}"
            raise UserError(message) from error

    def __len__(self) -> int:
        return len(self.examples)

    def split(self, every: int) -> tuple[CalibrationSet, CalibrationSet | None]:
        """Split into the search's examples and a held-out set, one of every `every` examples.

        Tasks alternate in the set, and also in the held-out part: the offset within `every`
        advances where it would always hit the same tasks. With fewer than `every` it is empty.
        """
        tasks = len({example.task for example in self.examples})
        divisor = math.gcd(every, tasks)
        blocks = range(len(self) // every)
        offsets = (block // (tasks // divisor) % divisor for block in blocks)
        held_out = {every * (n + 1) - 1 - offset for n, offset in zip(blocks, offsets, strict=True)}
        if not held_out:
            return self, None
        used = (example for index, example in enumerate(self.examples) if index not in held_out)
        others = (self.examples[index] for index in sorted(held_out))
        return CalibrationSet(tuple(used)), CalibrationSet(tuple(others))

    @property
    def max_length(self) -> int:
        """Tokens of the longest example."""
        return max(len(example.input_ids) for example in self.examples)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the examples in their order."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(json.dumps([example.input_ids, example.answer_length]).encode())
        return digest.hexdigest()


def _record(line: bytes) -> tuple[list[int], int, str]:
    """Token ids, answer length and task of a line; raises ValueError."""
    record = json.loads(line.decode())
    fields = record if isinstance(record, dict) else {}
    ids, answer_length = fields.get("input_ids"), fields.get("answer_length")
    if (
        not isinstance(ids, list)
        or not all(type(i) is int and 0 <= i < 2**31 for i in ids)
        or type(answer_length) is not int
    ):
        raise ValueError("expected input_ids and answer_length, a list of integers and one more")
    return ids, answer_length, str(fields.get("task", ""))
