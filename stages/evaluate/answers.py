"""Answers of one model on disk, so that a killed run repeats none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from bosch.errors import RunError, UserError
from bosch.files import canonical_json, names_in
from bosch.journal import Journal


class ModelError(RunError):
    """This model cannot be evaluated; the evaluation of other models continues."""


def digest_of(content: Any) -> str:
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:16]


class AnswerLog:
    """Answers by a digest of their request; all ranks know all of them after `shared`.

    lm-eval's own cache goes by the request alone, and would give one model's answers as another's:
    here each model has its own folder. Every rank appends to its own file in it, and at the start
    reads the files of all.
    """

    def __init__(self, folder: Path, state: PartialState) -> None:
        self.folder, self._state, self._own = folder, state, dict[str, Any]()
        self._journal = Journal(folder / f"rank{state.process_index}.jsonl")
        self.known: dict[str, Any] = {}
        for name in names_in(folder):
            self.known.update(
                Journal(folder / name).read_new(lambda line: (line["key"], line["answer"]))
            )
        state.wait_for_everyone()  # before any rank appends

    def add(self, key: str, answer: Any, keep: bool = True) -> None:
        """Store an answer; one that is not to be kept is repeated after a kill."""
        if keep:
            self._journal.append({"key": key, "answer": answer})
        self._own[key] = answer

    def share(self, items: list[Any]) -> list[Any]:
        """Those of the items that this rank answers."""
        return items[self._state.process_index :: self._state.num_processes]

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Give all ranks the answers that were added in the block; a fault is raised on all."""
        faults: list[tuple[type[Exception], str]] = []
        try:
            yield
        except (ModelError, UserError) as error:
            faults.append((type(error), str(error)))
        for known, faulty in gather_object([(self._own, faults)]):
            self.known |= known
            for kind, text in faulty:
                raise kind(text)
        self._own = {}
