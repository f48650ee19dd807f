"""Text files, the prose of haystacks, and their tokens."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import load_json
from data_prep.source_files import files_of, open_plain


def read_utf8(path: Path) -> str:
    """A file's text, decompressed and without a byte order mark."""
    with open_plain(path) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}; convert the file") from None


def haystack_words(essay_dir: str | Path | None) -> list[str]:
    """The corpus as words, without white space; files sorted by name.

    A `.json` file holds an object with a field `text`, like RULER's essay file. Raises UserError if
    the folder is missing or has no text, or a file is damaged.
    """
    if essay_dir is None:
        words = " ".join(pydoc_topics().values()).split()
    else:
        files = files_of("essay_dir", str(essay_dir), (".txt", ".md", ".json"))
        words = " ".join(map(_read_prose, files)).split()
    if not words:
        raise UserError(f"essay_dir {essay_dir}: the files hold no text; name a folder of prose")
    return words


def essay_identity(essay_dir: str | Path | None, words: Sequence[str]) -> dict[str, str | int]:
    """The corpus for statistics and reports: name, number of words, SHA-256."""
    version = ".".join(map(str, sys.version_info[:3]))
    name = f"pydoc topics of Python {version}" if essay_dir is None else str(essay_dir)
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
    return {"name": name, "words": len(words), "sha256": digest}


def pydoc_topics() -> dict[str, str]:
    """Python's language help, by topic, sorted."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "this Python comes without pydoc's topics (package pydoc_data): "
            "name a folder of prose as essay_dir"
        ) from None
    return dict(sorted(topics.items()))


def _read_prose(path: Path) -> str:
    if path.suffix != ".json":
        return read_utf8(path)
    try:
        field = load_json(path)["text"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: expected a JSON object with a field `text`") from None
    return str(field)


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text to continue: with opening special tokens, without closing ones."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if ids and tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that follows a prompt."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """A function that counts a text's tokens without special ones, like RULER."""
    special = len(encode_prompt(tokenizer, ""))
    return lambda text: len(encode_prompt(tokenizer, text)) - special
