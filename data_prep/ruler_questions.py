"""RULER's question answering: questions of SQuAD and HotpotQA on documents among others."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, NamedTuple

from bosch.errors import UserError
from data_prep.ruler_base import Draft, RulerTask, read_data
from data_prep.ruler_tasks import DATA_FILES


class _Question(NamedTuple):
    """A question, its answers, and the numbers of its documents and of others on its subject."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]


class QuestionAnswering(RulerTask):
    """A question on documents among others, from a local file of SQuAD or HotpotQA."""

    _PREFIX = " Answer:"
    _ORDER = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words."
    )

    def __init__(self, task: str, *args: Any) -> None:
        super().__init__(*args)
        path = Path(self.corpus.data_dir or "", DATA_FILES[task])
        read = {"qa_1": _squad, "qa_2": _hotpotqa}[task]
        try:
            self._questions, self._documents = read(read_data(path))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: not the file that RULER downloads ({type(error).__name__}: {error})"
            ) from None
        self._path = path
        self.step = self._step(10, 1)

    def draw(self, index: int, size: int) -> Draft:
        if index >= len(self._questions):
            raise UserError(f"{self._path}: holds {len(self._questions):,} questions; ask for less")
        one = self._questions[index]
        own, related = one.documents, one.related
        size = max(size, len(own))
        if size >= len(self._documents):
            repeats = math.ceil(size / len(self._documents))
            documents = (self._documents * repeats)[:size]
        else:
            if size - len(own) > len(related):
                used = {*own, *related}
                unused = [at for at in range(len(self._documents)) if at not in used]
                count = size - len(own) - len(related)
                numbers = own + related + self.random.sample(unused, count)
            else:
                numbers = own + self.random.sample(related, size - len(own))
            documents = [self._documents[at] for at in numbers]
        random.Random(self.seed).shuffle(documents)
        context = "\n\n".join(f"Document {i}:\n{d}" for i, d in enumerate(documents, 1))
        text = (
            f"{self._ORDER}\n\nThe following are given documents.\n\n{context}\n\n{self._ORDER}"
            f"\n\nQuestion: {one.text}{self._PREFIX}"
        )
        return Draft(text, self._PREFIX, one.answers, [])


def _squad(content: Any) -> tuple[list[_Question], list[str]]:
    """SQuAD 2.0's answerable questions; a question's article is what it is related to."""
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for many in articles for paragraph in many})
    number = {document: at for at, document in enumerate(documents)}
    questions = []
    for paragraphs in articles:
        article = [number[paragraph["context"]] for paragraph in paragraphs]
        for paragraph in paragraphs:
            own = number[paragraph["context"]]
            related = [at for at in article if at != own]
            questions += [
                _Question(one["question"], [a["text"] for a in one["answers"]], [own], related)
                for one in paragraph["qas"]
                if not one["is_impossible"]
            ]
    return questions, documents


def _hotpotqa(content: Any) -> tuple[list[_Question], list[str]]:
    """HotpotQA's questions, each with the ten documents that come with it."""
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in one["context"]] for one in content]
    documents = sorted({text for many in texts for text in many})
    number = {document: at for at, document in enumerate(documents)}
    questions = [
        _Question(one["question"], [one["answer"]], [number[text] for text in many], [])
        for one, many in zip(content, texts, strict=True)
    ]
    return questions, documents
