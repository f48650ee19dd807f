"""Questions on documents from the files that RULER downloads: SQuAD 2.0 and HotpotQA."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from bosch.errors import UserError
from bosch.files import load_user_json


class Question(NamedTuple):
    """A question, its answers, and the numbers of its documents and of others on its subject."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]


def read_questions(task: str, path: Path) -> tuple[list[Question], list[str]]:
    """The questions of `qa_1` (SQuAD) or `qa_2` (HotpotQA) and all documents, in sorted order.

    Raises UserError when the file is missing, damaged or another one.
    """
    read = {"qa_1": _squad, "qa_2": _hotpotqa}[task]
    try:
        return read(load_user_json(path, "get the file again"))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: not the file that RULER downloads ({type(error).__name__}: {error})"
        ) from None


def _squad(content: Any) -> tuple[list[Question], list[str]]:
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
                Question(one["question"], [a["text"] for a in one["answers"]], [own], related)
                for one in paragraph["qas"]
                if not one["is_impossible"]
            ]
    return questions, documents


def _hotpotqa(content: Any) -> tuple[list[Question], list[str]]:
    """HotpotQA's questions, each with the ten documents that come with it."""
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in one["context"]] for one in content]
    documents = sorted({text for many in texts for text in many})
    number = {document: at for at, document in enumerate(documents)}
    questions = [
        Question(one["question"], [one["answer"]], [number[text] for text in many], [])
        for one, many in zip(content, texts, strict=True)
    ]
    return questions, documents
