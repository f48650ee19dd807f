"""The calibration set D: teacher-forced examples whose answers the model must get right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from bosch.errors import UserError

# A search measures the set in up to so many parts, between which an evaluation can end early.
MAX_PARTS = 8

Record: TypeAlias = tuple[list[int], int] | tuple[list[int], int, int]


@dataclass(frozen=True)
class CalibrationExample:
    """Token ids of prompt and answer; the last `answer_length` ids are the answer.

    The first `shared_length` ids are those of the neighbouring examples too, where these ask
    another question about the same text.
    """

    input_ids: tuple[int, ...]
    answer_length: int
    shared_length: int = 0

    @property
    def shared_ids(self) -> tuple[int, ...]:
        """The ids before the question."""
        return self.input_ids[: self.shared_length]


@dataclass(frozen=True)
class CalibrationSet:
    """The examples on which S(z) is measured."""

    examples: tuple[CalibrationExample, ...]

    @classmethod
    def from_records(cls, records: Iterable[Record]) -> CalibrationSet:
        """From token ids, answer length and, where any are shared, the number of shared ids.

        Raises ValueError for an impossible record.
        """
        examples = []
        for ids, answer_length, *rest in records:
            if not 0 < answer_length < len(ids):
                raise ValueError(
                    f"an answer of {answer_length} tokens does not fit an example of {len(ids)}"
                )
            shared_length = rest[0] if rest else 0
            if not 0 <= shared_length < len(ids) - answer_length:
                raise ValueError(
                    f"{shared_length} shared tokens leave no question in a prompt of "
                    f"{len(ids) - answer_length}"
                )
            input_ids = tuple(int(i) for i in ids)
            examples.append(CalibrationExample(input_ids, int(answer_length), int(shared_length)))
        if not examples:
            raise ValueError("it holds no example")
        return cls(tuple(examples))

    @classmethod
    def load(cls, path: Path) -> CalibrationSet:
        """Read `calibration.jsonl`; raises UserError when it is missing or damaged."""
        if path.is_dir():
            path = path / "calibration.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise UserError(
                f"{path}: cannot read the calibration set ({reason}); run prepare again"
            ) from error
        try:
            records = [json.loads(line) for line in lines if line.strip()]
            return cls.from_records(
                (r["input_ids"], r["answer_length"], r.get("shared_length", 0)) for r in records
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: the calibration set is damaged ({error}); run prepare again"
            ) from error

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def max_length(self) -> int:
        """Tokens of the longest example."""
        return max(len(example.input_ids) for example in self.examples)

    @cached_property
    def haystacks(self) -> list[list[int]]:
        """Places of the examples that share a text, and of each other one by itself, in order."""
        found: list[list[int]] = []
        for place, example in enumerate(self.examples):
            before = self.examples[place - 1] if place else None
            if before and example.shared_length and before.shared_ids == example.shared_ids:
                found[-1].append(place)
            else:
                found.append([place])
        return found

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the examples in their order."""
        digest = hashlib.sha256()
        for example in self.examples:
            record = [example.input_ids, example.answer_length]
            if example.shared_length:
                record.append(example.shared_length)
            digest.update(json.dumps(record).encode())
        return digest.hexdigest()
