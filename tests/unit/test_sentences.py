"""Sentences split by punkt, if its data is in a folder that nltk searches, otherwise by rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.tasks.words import sentence_splitter, split_by_rule
from data_prep.text import pydoc_topics

# An abbreviation that punkt learns from the corpus; the rule ends a sentence there.
TEXT = "It has many uses, approx. Ten of them are known. Others follow."


def test_punkt_splits_if_its_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk  # here: it would cost seconds in every process that collects the tests

    folder = tmp_path / "tokenizers/punkt_tab/english"
    folder.mkdir(parents=True, mode=0o700)
    corpus = " ".join(list(pydoc_topics().values())[:20])
    corpus += " Of approx. five uses, approx. two count." * 50
    punkt = nltk.tokenize.punkt
    parameters = punkt.PunktTrainer(corpus).get_params()
    monkeypatch.setattr(nltk.data, "path", [])
    assert sentence_splitter.__wrapped__() == (split_by_rule, "built in")
    assert len(split_by_rule(TEXT)) == 3
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])  # it writes nowhere else
    punkt.save_punkt_params(parameters, str(folder))
    split, name = sentence_splitter.__wrapped__()
    assert name.startswith("punkt of nltk ")
    assert split(TEXT) == punkt.PunktSentenceTokenizer(parameters).tokenize(TEXT)
    assert len(split(TEXT)) == 2
