"""HELMET's RAG and key-value tasks (arXiv:2410.02694), from its published files.

Prompts, draws and scores are those of its code (princeton-nlp/HELMET): a question after passages of
Wikipedia with two worked examples, and a key of a JSON object.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bosch.errors import UserError
from data_prep.documents.records import read_rows
from stages.evaluate.chat import ChatTemplate, Turns, prompt_of
from stages.evaluate.prompt_suite import PromptSample
from stages.evaluate.suites.helmet import HELMET_TASKS, Helmet, HelmetTask

Row = Mapping[str, Any]

SHOTS = 2
_QUESTION = (
    "Use the given documents to write a concise and short answer to the question. Write your "
    "answer in the following format:\nAnswer: [answer]\n\n{demos}{context}\n\nQuestion: {question}"
)
_KEY = (
    "{context}\n\nExtract the value corresponding to the specified key in the JSON object below."
    "\n\n{demos}Key: {question}"
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class HelmetSample(NamedTuple):
    """A prompt in parts; only `context` is truncated if it is too long."""

    template: str
    context: str
    demos: str
    question: str
    ending: str
    answers: tuple[str, ...]
    document: str | None = None  # key of the question, which has a row for each depth

    def prompt(self, context: str | None = None) -> str:
        """The text before `ending`, with which the answer begins."""
        shown = self.context if context is None else context
        return self.template.format(context=shown, demos=self.demos, question=self.question)


def is_used(task: HelmetTask, row: Row) -> bool:
    """Whether a task uses a row of its file: PopQA leaves out the most popular entities."""
    return task.most_popular is None or math.log10(row["s_pop"]) < task.most_popular


def key_of(row: Row) -> Any:
    """Identity of a question, whose rows have the right passage at different depths."""
    return row["id"] if "id" in row else row["question"]


def rag_sample(task: HelmetTask, row: Row, examples: Sequence[Row]) -> HelmetSample:
    """The prompt of a RAG question.

    Its worked examples are drawn by a hash of the question, so that all its depths have the same.
    Raises KeyError, TypeError, ValueError or IndexError for a row that is not in HELMET's layout.
    """
    key = key_of(row)
    # PopQA's examples come from the same split as its questions.
    usable = [
        example for example in examples if task.most_popular is None or key_of(example) != key
    ]
    seed = int(hashlib.sha256(str(key).encode()).hexdigest(), 16) % 2**31
    shown: dict[Any, Row] = {}
    for index in np.random.default_rng(seed).permutation(len(usable)):
        shown.setdefault(key_of(usable[index]), usable[index])
        if len(shown) == SHOTS:
            break
    demos = "".join(
        f"{_passages(shot)}\n\nQuestion: {shot['question']}\nAnswer: {_answers(shot)[0]}\n\n"
        for shot in shown.values()
    )
    return HelmetSample(
        _QUESTION, _passages(row), demos, str(row["question"]), task.ending, _answers(row), str(key)
    )


def key_value_sample(task: HelmetTask, row: Row) -> HelmetSample:
    """The prompt of a key; raises as `rag_sample` does."""
    if not row["answer"]:  # every output contains an empty answer
        raise ValueError("the answer is empty")
    shown = row["demos"][:SHOTS]
    demos = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in shown)
    answers = (str(row["answer"]),)
    return HelmetSample(
        _KEY, str(row["context"]), demos, str(row["question"]), task.ending, answers
    )


def fitted(
    sample: HelmetSample, most_tokens: int, tokenizer: Any, chat: ChatTemplate | None = None
) -> str:
    """The prompt; its context is truncated at the end if it has more than `most_tokens`.

    All tokens count: also those of the chat template or, without one, of the ending. Raises
    UserError if there are too many even without the context.
    """
    text, plain = sample.prompt(), partial(_with_ending, sample.ending)
    offsets: Any = None  # of the remaining tokens of the context
    # Once as in HELMET's code; again if the cut splits a token such as ".\n\n" at the end.
    while (excess := len(prompt_of(tokenizer, _user_turn(text), chat, plain)[1]) - most_tokens) > 0:
        if offsets is None:
            offsets = tokenizer(
                sample.context, return_offsets_mapping=True, add_special_tokens=False
            )["offset_mapping"]
        if excess > len(offsets):
            raise UserError(
                f"evaluate.helmet: the question {sample.question!r:.60} takes more than "
                f"{most_tokens:,} tokens without any of its context; leave it out of the data"
            )
        text = sample.prompt(sample.context[: offsets[-excess][0]])
        offsets = offsets[:-excess]
    return text


def score(output: str, answers: Sequence[str]) -> float:
    """1 if the output contains an answer, both without case, articles and punctuation.

    The whole output counts: HELMET's configurations set `stop_new_line`, but its code ignores it.
    As in its code, an answer of articles and punctuation only is in every output.
    """
    text = _plain(output)
    return float(any(_plain(answer) in text for answer in answers))


def _passages(row: Row) -> str:
    shown = (f"Document (Title: {passage['title']}): {passage['text']}" for passage in row["ctxs"])
    return "\n\n".join(shown)


def _answers(row: Row) -> tuple[str, ...]:
    answers = row["answers"]
    # Every output contains an empty answer, and a null would become the text None.
    if not isinstance(answers, list) or not answers or not all(answers):
        raise ValueError("answers are no list of one or more texts")
    return tuple(map(str, answers))


def _plain(text: str) -> str:
    text = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join(text.split())


def samples(
    section: Helmet, tokenizer: Any, seed: int, chat: ChatTemplate | None
) -> Iterator[PromptSample]:
    """The samples of each task at each length, the limit of prompt, template and answer together.

    Raises UserError when a file is not in the public layout.
    """
    for name in section.tasks:
        task = HELMET_TASKS[name]
        for length in section.lengths:
            file = Path(section.data_dir, task.file.format(k=task.counts[length]))
            most = length - task.new_tokens
            make = _key_values if task.examples is None else _questions
            for sample in make(section, task, file, seed):
                yield PromptSample(
                    name,
                    length,
                    turns=partial(_turns, sample, most, tokenizer, chat),
                    answers=sample.answers,
                    new_tokens=task.new_tokens,
                    document=sample.document,
                    score=partial(score, answers=sample.answers),
                    plain=partial(_with_ending, sample.ending),
                )


def _questions(section: Helmet, task: HelmetTask, file: Path, seed: int) -> Iterator[HelmetSample]:
    examples = _rows(task, Path(section.data_dir, str(task.examples)), dict)
    try:
        keys = sorted(set(_rows(task, file, key_of)))
    except TypeError as error:  # the values cannot be ordered
        raise UserError(f"{file}: not in HELMET's layout ({error} as id or question)") from None
    count = len(keys) if section.samples is None else min(section.samples, len(keys))
    chosen = set(random.Random(seed).sample(keys, count))

    def make(row: Any) -> HelmetSample | None:
        is_drawn = key_of(row) in chosen
        return rag_sample(task, row, examples) if is_drawn else None

    yield from filter(None, _rows(task, file, make))


def _key_values(section: Helmet, task: HelmetTask, file: Path, seed: int) -> Iterator[HelmetSample]:
    samples = _rows(task, file, partial(key_value_sample, task))
    for index in np.random.default_rng(seed).permutation(len(samples))[: section.samples]:
        yield samples[index]


def _rows(task: HelmetTask, file: Path, make: Callable[[Any], Any]) -> list[Any]:
    """`make(row)` for each row that the task uses; raises UserError for an invalid row."""
    rows = []
    for number, row in enumerate(read_rows(file, ())):
        try:
            if is_used(task, row):
                rows.append(make(row))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{file}, row {number}: not in HELMET's layout ({reason})") from None
    return rows


def _turns(
    sample: HelmetSample, most_tokens: int, tokenizer: Any, chat: ChatTemplate | None
) -> Turns:
    return _user_turn(fitted(sample, most_tokens, tokenizer, chat))


def _user_turn(text: str) -> Turns:
    return [{"role": "user", "content": text}]


def _with_ending(ending: str, turns: Turns) -> str:
    """The prompt of a model without a chat template."""
    return turns[-1]["content"] + ending
