"""Text files, the prose of haystacks, and their tokens."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import load_json
from data_prep.source_files import files_below, open_plain

_PROSE_SUFFIXES = (".txt", ".md", ".json")


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
        words = " ".join(_read_prose(path) for path in haystack_files(Path(essay_dir))).split()
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


def haystack_files(
    folder: Path, name: str = "essay_dir", suffixes: tuple[str, ...] = _PROSE_SUFFIXES
) -> list[Path]:
    """The folder's text files, sorted by name, without hidden ones.

    Raises UserError if there is none.
    """
    if not folder.is_dir():
        raise UserError(f"{name} {folder}: no such folder; name a folder of .txt or .md files")
    files = sorted(path for path in files_below(folder) if path.suffix in suffixes)
    if not files:
        raise UserError(f"{name} {folder}: holds no {', '.join(suffixes)} file")
    return files


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


class TokenCounter:
    """Counts tokens of prompts without special tokens, like RULER; `calls` of the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = len(encode_prompt(tokenizer, ""))
        self._last: tuple[str, list[int]] = ("", [])
        self.calls = 0

    def ids(self, text: str) -> list[int]:
        """The prompt's ids, opening special tokens included."""
        if not text or text != self._last[0]:
            self.calls += 1
            self._last = (text, encode_prompt(self._tokenizer, text))
        return self._last[1]

    def tokens(self, text: str) -> int:
        return len(self.ids(text)) - self._special

    def fits(self, text: str, limit: int, noise: int = 0) -> bool:
        """Whether the text has at most `limit` tokens; tokenises only if the number is close.

        `noise`: additional difference in tokens between texts of equal length.
        """
        last_text, ids = self._last
        if last_text:
            per_character = len(ids) / len(last_text)
            added = len(text) - len(last_text)
            slack = 0.4 * per_character * abs(added) + limit / 256 + 32 + noise
            distance = len(ids) + per_character * added - limit
            if abs(distance) > slack:
                return distance < 0
        return self.tokens(text) <= limit
