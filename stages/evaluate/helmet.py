"""HELMET's samples for the suite of prompts: RAG and key-value recall."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from data_prep.documents.records import read_rows
from data_prep.tasks import helmet
from data_prep.tasks.helmet import HelmetSample
from data_prep.tasks.tables import HELMET_TASKS, HelmetTask
from stages.evaluate.chat import ChatTemplate
from stages.evaluate.prompt_sections import HelmetEvaluation
from stages.evaluate.prompt_suite import PromptSample, Turns


def samples(
    section: HelmetEvaluation, tokenizer: Any, seed: int, chat: ChatTemplate | None
) -> list[PromptSample]:
    """The samples of each task at each length, of which prompt, template and answer take no more.

    Raises UserError when a file is not in the public layout.
    """
    prompts = []
    for name in section.tasks:
        task = HELMET_TASKS[name]
        for length in section.lengths:
            file = Path(section.data_dir, task.file.format(k=task.counts[length]))
            most = length - task.new_tokens - (chat.tokens if chat is not None else 0)
            read = _key_values if task.examples is None else _questions
            for sample in read(section, task, file, seed):
                prompts.append(
                    PromptSample(
                        task=name,
                        length=length,
                        turns=partial(_turns, sample, most, tokenizer),
                        answers=sample.answers,
                        new_tokens=task.new_tokens,
                        score=partial(helmet.score, answers=sample.answers, one_line=task.one_line),
                        plain=partial(_plain, sample.ending),
                        stop_at_newline=task.one_line,
                        document=sample.document,
                    )
                )
    return prompts


def _questions(
    section: HelmetEvaluation, task: HelmetTask, file: Path, seed: int
) -> Iterator[HelmetSample]:
    examples = _rows(task, Path(section.data_dir, str(task.examples)), dict)
    try:
        chosen = helmet.drawn_keys(_rows(task, file, helmet.key_of), section.samples, seed)
    except TypeError as error:  # they have no order
        raise UserError(f"{file}: not in HELMET's layout ({error} as id or question)") from None

    def make(row: Any) -> HelmetSample | None:
        is_drawn = helmet.key_of(row) in chosen
        return helmet.rag_sample(task, row, examples) if is_drawn else None

    yield from filter(None, _rows(task, file, make))


def _key_values(
    section: HelmetEvaluation, task: HelmetTask, file: Path, seed: int
) -> Iterator[HelmetSample]:
    every = _rows(task, file, partial(helmet.key_value_sample, task))
    for index in helmet.drawn_rows(len(every), section.samples, seed):
        yield every[index]


def _rows(task: HelmetTask, file: Path, make: Callable[[Any], Any]) -> list[Any]:
    """What is made of each row that the task has."""
    rows = []
    for number, row in enumerate(read_rows(file, ())):
        try:
            if helmet.keep(task, row):
                rows.append(make(row))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{file}, row {number}: not in HELMET's layout ({reason})") from None
    return rows


def _turns(sample: HelmetSample, most_tokens: int, tokenizer: Any) -> Turns:
    return [{"role": "user", "content": helmet.fitted(sample, most_tokens, tokenizer)}]


def _plain(ending: str, turns: Turns) -> str:
    """For a model without a chat template: ends where the answer begins."""
    return turns[-1]["content"] + ending
