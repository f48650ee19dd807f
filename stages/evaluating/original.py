"""Answers of the original model, which every recipe on it shares: it is asked once."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.shared_lines import SharedLines
from stages.configs import NeedleEvaluation
from stages.evaluating.needle_suite import answers_file, cells_of, read_answers

logger = logging.getLogger(__name__)

NAME = "original"


class SharedAnswers:
    """The original model's answers in a file that all evaluations of one model share.

    `identity` is the text of what an answer depends on besides task, length and index. Answers
    stand where the suite looks for them, below `folder`; the shared file only adds to them.
    """

    def __init__(self, shared: Path, identity: str, section: NeedleEvaluation, folder: Path):
        self._lines = SharedLines(shared, "answers", identity)
        self._cells, self._folder = cells_of(section), folder
        self._samples = section.samples
        self._known: dict[tuple[str, int, int], Mapping[str, Any]] = {}
        self._lines.read_new(self._learn)

    def fetch(self) -> int:
        """Put what is known and not yet below the folder there; returns how many answers."""
        fetched = 0
        for cell in self._cells:
            here = read_answers(self._folder, NAME, cell)
            known = [self._known.get((cell.task, cell.length, i)) for i in range(self._samples)]
            missing = [r for i, r in enumerate(known) if r is not None and i not in here]
            if missing:
                path = answers_file(self._folder, NAME, cell, "shared")
                path.parent.mkdir(parents=True, exist_ok=True)
                text = "".join(json.dumps(record) + "\n" for record in missing)
                path.write_text(text, encoding="utf-8")
                fetched += len(missing)
        return fetched

    def give(self) -> None:
        """Add the answers that nobody else has given yet."""
        new = [
            {"task": cell.task, "length": cell.length, **record}
            for cell in self._cells
            for index, record in sorted(read_answers(self._folder, NAME, cell).items())
            if (cell.task, cell.length, index) not in self._known
        ]
        self._lines.append(*new)

    def _learn(self, record: dict[str, Any]) -> None:
        key = record["task"], record["length"], record["index"]
        self._known[key] = {k: v for k, v in record.items() if k not in ("task", "length")}
