"""Sentences split by punkt, if its data is in a folder that nltk searches, otherwise by rule."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_prep.tasks.words import sentences_identity, split_by_rule
from data_prep.text import pydoc_topics

ROOT = Path(__file__).parents[2]
# An abbreviation that punkt learns from the corpus; the rule ends a sentence there.
TEXT = "It has many uses, approx. Ten of them are known. Others follow."
_SPLIT = """
import json, sys
from data_prep.tasks.words import nltk_folders, sentences_identity, split_as_ruler
print(json.dumps([sentences_identity(), split_as_ruler(sys.stdin.read())]))
import nltk
assert list(map(str, nltk_folders())) == nltk.data.path
"""


@pytest.fixture(scope="module")
def nltk() -> Any:
    """Imported here: it would cost seconds in every process that collects the tests."""
    return importlib.import_module("nltk")


def _split(data: Path) -> tuple[str, list[str]]:
    # nltk reads NLTK_DATA at its import.
    done = subprocess.run(
        [sys.executable, "-c", _SPLIT],
        cwd=ROOT, input=TEXT, capture_output=True, text=True, check=True,
        env={**os.environ, "NLTK_DATA": str(data), "HOME": str(data)},
    )  # fmt: skip
    identity, sentences = json.loads(done.stdout)
    return identity, sentences


def test_punkts_data_is_searched_where_nltk_searches(
    nltk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    monkeypatch.setattr(Path, "is_dir", lambda path: looked.append(path))
    assert sentences_identity() == "built in"
    assert looked == [Path(folder, "tokenizers/punkt_tab/english") for folder in nltk.data.path]


def test_punkt_splits_if_its_data_is_found(
    nltk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokenizers/punkt_tab/english"
    folder.mkdir(parents=True, mode=0o700)
    corpus = " ".join(list(pydoc_topics().values())[:20])
    corpus += " Of approx. five uses, approx. two count." * 50
    punkt = nltk.tokenize.punkt
    parameters = punkt.PunktTrainer(corpus).get_params()
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])  # it writes nowhere else
    punkt.save_punkt_params(parameters, str(folder))
    identity, sentences = _split(tmp_path)
    assert identity.startswith("punkt of nltk ")
    assert sentences == punkt.PunktSentenceTokenizer(parameters).tokenize(TEXT)
    assert len(sentences) == 2 and len(split_by_rule(TEXT)) == 3
