"""NoLiMa's samples for the suite of prompts; a task for each kind of question."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.tasks import nolima
from data_prep.text import read_utf8
from stages.evaluate.chat import ChatTemplate
from stages.evaluate.prompt_sections import NolimaEvaluation
from stages.evaluate.prompt_suite import PromptSample, Turns


def samples(
    section: NolimaEvaluation, tokenizer: Any, seed: int, chat: ChatTemplate | None
) -> list[PromptSample]:
    """The needles of the set at every depth of every book, or as many as are asked for.

    Raises UserError when the needle set or a book cannot be read, or a book is too short.
    """
    folder = Path(section.data_dir)
    own = folder / "task_template.txt"
    template = read_utf8(own).removesuffix("\n") if own.is_file() else None
    tests = nolima.needle_tests(folder / section.needle_set, template)
    books = [nolima.Book(path, tokenizer) for path in section.books(folder)]
    prompts = []
    for length in section.lengths:
        every = nolima.samples_of(tests, len(books), section.depths, length)
        rng = np.random.default_rng([seed, length])
        chosen = rng.permutation(len(every))[: section.samples]
        for index in sorted(chosen.tolist()):
            sample = every[index]
            sample.check_room(books[sample.book], length)  # before a model is loaded
            prompts.append(
                PromptSample(
                    task=sample.test.kind,
                    length=length,
                    turns=partial(_turns, sample, books[sample.book], length),
                    answers=sample.answers,
                    new_tokens=section.max_new_tokens,
                    score=partial(nolima.score, answers=sample.answers),
                )
            )
    return prompts


def _turns(sample: nolima.NolimaSample, book: nolima.Book, length: int) -> Turns:
    system = sample.test.system_prompt
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": sample.prompt(book, length)}]
