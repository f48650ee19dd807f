"""Sentences by punkt, where its data lies in a folder that nltk searches, and by rule elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nltk.data
import pytest
from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTrainer

from data_prep.tasks.words import sentences_identity, split_by_rule
from data_prep.text import pydoc_topics

ROOT = Path(__file__).parents[2]
# An abbreviation that the corpus teaches: the rule ends a sentence there.
TEXT = "It has many uses, approx. Ten of them are known. Others follow."
CORPUS = " ".join(list(pydoc_topics().values())[:20]) + (
    " Of approx. five uses, approx. two count." * 50
)
_SAVE = """
import sys
from pathlib import Path
from nltk.tokenize.punkt import PunktTrainer, save_punkt_params
trainer = PunktTrainer(sys.stdin.read())
Path(sys.argv[1]).mkdir(parents=True, mode=0o700)
save_punkt_params(trainer.get_params(), sys.argv[1])
"""
_SPLIT = """
import json, sys
from data_prep.tasks.words import nltk_folders, sentences_identity, split_as_ruler
print(json.dumps([sentences_identity(), split_as_ruler(sys.stdin.read())]))
import nltk
assert list(map(str, nltk_folders())) == nltk.data.path
"""


def _python(code: str, text: str, data: Path, *arguments: str) -> str:
    # nltk reads NLTK_DATA while it is imported.
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, input=text, capture_output=True, text=True, check=True,
        env={**os.environ, "NLTK_DATA": str(data), "HOME": str(data)},
    )  # fmt: skip
    return done.stdout


def _split(data: Path) -> tuple[str, list[str]]:
    identity, sentences = json.loads(_python(_SPLIT, TEXT, data))
    return identity, sentences


def test_its_data_is_looked_for_where_nltk_does(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []
    monkeypatch.setattr(Path, "is_dir", lambda path: looked.append(path))
    assert sentences_identity() == "built in"
    assert looked == [Path(folder, "tokenizers/punkt_tab/english") for folder in nltk.data.path]


def test_punkt_splits_where_its_data_is(tmp_path: Path) -> None:
    assert _split(tmp_path) == ("built in", split_by_rule(TEXT))
    _python(_SAVE, CORPUS, tmp_path, str(tmp_path / "tokenizers/punkt_tab/english"))
    identity, sentences = _split(tmp_path)
    assert identity.startswith("punkt of nltk ")
    parameters: Any = PunktTrainer(CORPUS).get_params()
    assert sentences == PunktSentenceTokenizer(parameters).tokenize(TEXT)
    assert len(sentences) == 2 and len(split_by_rule(TEXT)) == 3
