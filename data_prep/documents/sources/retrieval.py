"""Endless synthetic documents for retrieval."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable

from data_prep.documents.sources import Kind, Part, Source
from data_prep.text import haystack_words

_DOCUMENTS = 256  # documents of a part


class _Retrieval(Kind):
    about = "synthetic key-value and needle documents"
    needs_path = False
    is_endless = True

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        longest = max(4000, 2 * sequence_length)
        numpy = importlib.import_module("numpy")
        for index in itertools.count():
            words = numpy.random.SeedSequence([seed, index]).generate_state(2, numpy.uint32)
            high, low = words.tolist()
            yield Part(seed=high << 32 | low, most_characters=longest)

    def read(self, part: Part, source: Source) -> Iterable[str]:
        characters = 500, part.most_characters
        retrieval = importlib.import_module("data_prep.documents.retrieval")
        documents = retrieval.retrieval_documents(
            part.seed, haystack_words(None), characters=characters
        )
        return itertools.islice(documents, _DOCUMENTS)


KIND = _Retrieval()
