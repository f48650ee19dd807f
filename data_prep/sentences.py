"""Sentences of a text: by NLTK's punkt where its data is there, as RULER splits, else by rule."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path

# White space behind a full stop (a closing quote or bracket may follow it), before a new sentence;
# the stop of an initial ends nothing.
_SENTENCE_END = re.compile(
    r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))(?<!\b[A-Za-z]\.)\s+(?=["'(\[]?[A-Z0-9])"""
)
_PUNKT = Path("tokenizers/punkt_tab/english")


def split_by_rule(text: str) -> list[str]:
    """The sentences of a text, without the white space between them."""
    return _SENTENCE_END.split(text)


def split_as_ruler(text: str) -> list[str]:
    """The sentences of a text by punkt, or by rule where `sentences_identity` says so."""
    if _punkt_folder() is None:
        return split_by_rule(text)
    from nltk.tokenize import sent_tokenize

    sentences: list[str] = sent_tokenize(text)
    return sentences


def sentences_identity() -> str:
    """What splits sentences on this machine; nltk is not imported."""
    if _punkt_folder() is None:
        return "built in"
    return f"punkt of nltk {importlib.metadata.version('nltk')}"


def _punkt_folder() -> Path | None:
    """Where punkt's data lies, among the folders that nltk searches; None without nltk too."""
    try:
        importlib.metadata.version("nltk")
    except importlib.metadata.PackageNotFoundError:
        return None
    below = [Path(sys.prefix, folder, "nltk_data") for folder in ("", "share", "lib")]
    system = [Path("/usr", folder, "nltk_data") for folder in ("share", "local/share", "lib")]
    roots = [Path(root) for root in os.environ.get("NLTK_DATA", "").split(os.pathsep) if root]
    roots += [Path("~/nltk_data").expanduser(), *below, *system, Path("/usr/local/lib/nltk_data")]
    return next((root / _PUNKT for root in roots if (root / _PUNKT).is_dir()), None)
