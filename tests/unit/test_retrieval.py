"""Documents that train retrieval: properties of each kind, and stability of a seed."""

from __future__ import annotations

import hashlib
import itertools
from random import Random

import pytest
from transformers import AutoTokenizer

from data_prep.documents.retrieval import (
    Document,
    Segment,
    key_value_list,
    needle_document,
    repeated_spans,
    retrieval_document,
    retrieval_documents,
    two_hops,
)
from recipes.quickstart.training_rows import FIRST_ANSWER_WEIGHT, PROMPT_WEIGHT, Rows
from tests.ruler_case import TOKENIZER, essay_text

PROSE = essay_text(2000).split()
KINDS = {
    "list": key_value_list,
    "needle": needle_document,
    "repeat": repeated_spans,
    "hops": two_hops,
}
# Of forty documents of each kind. If digests change, training data does: raise prepare's version.
DIGESTS = {
    "list": "94799c19225de6a4",
    "needle": "981bef0dd50bde59",
    "repeat": "357ca545a484598b",
    "hops": "9f6fb715d612ac5b",
    "stream": "e1fc114c6a0c1c32",
}


def documents(kind: str) -> list[Document]:
    return [
        KINDS[kind](Random(seed), characters, PROSE)
        for seed in range(10)
        for characters in (200, 500, 1500, 4000)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_still_makes_the_same_documents(kind: str) -> None:
    content = repr([list(map(tuple, document)) for document in documents(kind)])
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == DIGESTS[kind]


@pytest.mark.parametrize("kind", range(4))
def test_a_document_has_about_the_requested_length(kind: int) -> None:
    prose = [f"word{number}" for number in range(5000)]
    weights = [float(number == kind) for number in range(4)]
    for seed in range(20):
        document = retrieval_document(Random(seed), 4000, prose, weights)
        assert 0.98 <= sum(len(segment.text) for segment in document) / 4000 <= 1.06
        earlier = ""
        for segment in document:  # the answer occurs earlier, whole or line by line
            assert not segment.is_answer or set(segment.text.split()) <= set(_words(earlier))
            earlier += segment.text


def test_hops_of_a_long_document_lead_to_one_answer() -> None:
    lines = "".join(segment.text for segment in two_hops(Random(0), 100_000, PROSE)).splitlines()
    keys = [line.split()[0] for line in lines if " holds " in line or " points to " in line]
    assert len(keys) == len({*keys}) > 1000


def test_weights_of_a_training_row_are_at_their_tokens() -> None:
    """Also after an answer without text."""
    rows = Rows(AutoTokenizer.from_pretrained(TOKENIZER), ["text"], PROSE)
    document = [Segment("a"), Segment("", True), Segment("b"), Segment("c", True)]
    ids, weights = rows.document(document)
    at = PROMPT_WEIGHT
    assert weights == [at, at, FIRST_ANSWER_WEIGHT, 0.1] and len(ids) == 4


def _words(text: str) -> list[str]:
    return text.replace(".", " ").replace(";", " ").replace("|", " ").replace(",", " ").split()


def test_a_stream_is_determined_by_seed_and_mixture() -> None:
    """Eight in ten ask for needles; lengths of all documents are between the two ends."""
    stream = list(itertools.islice(retrieval_documents(3, PROSE, (500, 4000)), 200))
    digest = hashlib.sha256("\0".join(stream).encode()).hexdigest()
    assert digest[:16] == DIGESTS["stream"]
    assert sum("magic" in text for text in stream) == pytest.approx(160, abs=15)
    short = itertools.islice(retrieval_documents(4, PROSE, (600, 700)), 30)
    assert all(500 < len(text) < 900 for text in short)
