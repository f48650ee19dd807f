"""RULER on one rank: its samples, made once for all runs, and a model's answers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from bosch.errors import UserError
from bosch.model.yarn import original_positions, yarn
from bosch.progress import progress
from data_prep.tasks.needles import string_match
from data_prep.tasks.ruler import Corpus
from data_prep.tasks.samples import SampleFolder
from data_prep.tasks.tables import ANY_ANSWER
from data_prep.tasks.words import sentences_identity, words_identity
from data_prep.text import essay_identity, haystack_words
from stages.evaluate.answers import Subtask, digest_of
from stages.evaluate.generation import Question
from stages.evaluate.suite import Records, Suite, answer_record
from stages.evaluate.suites.needle import NeedleEvaluation

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class NeedleSuite(Suite):
    """RULER's samples, and their answers."""

    section: NeedleEvaluation
    samples_folder: Path
    card: Path
    _questions: dict[Subtask, list[Question]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        data_dir = Path(self.section.data_dir) if self.section.data_dir is not None else None
        self._corpus = Corpus(haystack_words(self.section.essay_dir), data_dir)
        self._folders = {}
        for length, task in itertools.product(self.section.lengths, self.section.tasks):
            folder = SampleFolder(
                self.samples_folder, task, length, self.section.new_tokens(task), self.seed,
                self._corpus, self.tokenizer,
            )  # fmt: skip
            factor = self.section.yarn.get(length)
            identity = {**folder.identity, "yarn": factor}
            if factor is not None:
                from_recipe = self.section.yarn_original_length
                if original := from_recipe or original_positions({}, self.card):
                    identity["yarn_original_length"] = original
            if self.chat is not None:
                identity["chat"] = self.chat.digest
            self._folders[Subtask(task, length, digest_of(identity))] = folder

    @property
    def texts(self) -> dict[str, Any]:
        return {
            **essay_identity(self.section.essay_dir, self._corpus.essay),
            "keys": words_identity(),
            "sentences": sentences_identity(),
        }

    @property
    def subtasks(self) -> list[Subtask]:
        return list(self._folders)

    def samples(self, subtask: Subtask) -> int:
        return self.section.samples

    def prepare(self) -> None:
        """Make the samples of every `world`-th subtask.

        Raises UserError on all ranks for every task that does not fit, or whose data is missing or
        damaged.
        """
        own_subtasks = self.subtasks[self.rank :: self.world]
        with progress(len(own_subtasks) * self.section.samples, "RULER samples", "samples") as bar:
            for count in (1, self.section.samples):  # the first samples show what does not fit
                faults = []
                for subtask in own_subtasks:
                    try:
                        self._folders[subtask].make(count, bar.update)
                    except UserError as fault:
                        faults.append(str(fault))
                if faults := gather_object(faults):
                    raise UserError("\n".join(faults))

    def answer(self, subtask: Subtask, indices: Sequence[int], loaded: Any) -> Records:
        chosen, new_tokens = set(indices), self.section.new_tokens(subtask.task)
        questions = [q for q in self._subtask_questions(subtask) if q.index in chosen]
        factor = self.section.yarn.get(subtask.length)
        with yarn(loaded, factor, self.section.yarn_original_length, self.card):
            for batch in self.generated(loaded, questions, new_tokens):
                yield [
                    answer_record(q, string_match(text, q.answers, q.any_answer), q.answers, text)
                    for q, text in batch
                ]

    def _subtask_questions(self, subtask: Subtask) -> list[Question]:
        """The subtask's samples of this rank; cached, since all checkpoints share them."""
        if subtask not in self._questions:
            self._questions[subtask] = questions = []
            own_indices = range(self.rank, self.section.samples, self.world)
            for sample in self._folders[subtask].read(own_indices):
                if self.calibration is not None:
                    self.calibration.check(sample)
                any_answer, ids = subtask.task in ANY_ANSWER, sample.ids
                if self.chat is not None:
                    chat_ids = self.chat.ids(ids.tolist(), sample.prefix)
                    ids = np.array(chat_ids, np.int32)
                questions.append(
                    Question(sample.index, ids, sample.answers, sample.tail, any_answer)
                )
        return self._questions[subtask]
