"""Questions on documents from the files that RULER downloads: SQuAD 2.0 and HotpotQA."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from bosch.errors import UserError
from bosch.files import load_user_json


class Question(NamedTuple):
    """A question, its answers, and the indices of its documents and of related ones."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]


def read_questions(task: str, path: Path) -> tuple[list[Question], list[str]]:
    """The questions of `qa_1` (SQuAD) or `qa_2` (HotpotQA) and all documents, in sorted order.

    Raises UserError when the file is missing, damaged or not RULER's.
    """
    parse = {"qa_1": _squad, "qa_2": _hotpotqa}[task]
    try:
        return parse(load_user_json(path, "get the file again"))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: not the file that RULER downloads ({type(error).__name__}: {error})"
        ) from None


def _squad(content: Any) -> tuple[list[Question], list[str]]:
    """SQuAD 2.0's answerable questions; the other paragraphs of an article are related."""
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    indices = {document: index for index, document in enumerate(documents)}
    questions = []
    for article in articles:
        for paragraph in article:
            own_index = indices[paragraph["context"]]
            article_indices = [indices[other["context"]] for other in article]
            related = [index for index in article_indices if index != own_index]
            questions += [
                Question(qa["question"], [a["text"] for a in qa["answers"]], [own_index], related)
                for qa in paragraph["qas"]
                if not qa["is_impossible"]
            ]
    return questions, documents


def _hotpotqa(content: Any) -> tuple[list[Question], list[str]]:
    """HotpotQA's questions, each with the ten documents that come with it."""
    contexts = [[f"{title}\n{''.join(lines)}" for title, lines in qa["context"]] for qa in content]
    documents = sorted({text for context in contexts for text in context})
    indices = {document: index for index, document in enumerate(documents)}
    questions = [
        Question(qa["question"], [qa["answer"]], [indices[text] for text in context], [])
        for qa, context in zip(content, contexts, strict=True)
    ]
    return questions, documents
