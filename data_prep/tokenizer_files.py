"""The files that a tokenizer is read from; imports nothing heavy, for keys and checks."""

from __future__ import annotations

from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.bpe",
    "tekken.json",
    "normalizer.json",
    "chat_template.json",
    "chat_template.jinja",
)
# Of those whose names are the model's own.
_TOKENIZER_PATTERNS = ("*.model", "*.tiktoken", "*.spm", "tokenization_*.py")


def tokenizer_files(directory: Path) -> list[str]:
    """Names of the files in a directory that a tokenizer is read from, in order."""
    patterns = (*TOKENIZER_FILES, *_TOKENIZER_PATTERNS)
    files = {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    return sorted(path.name for path in files if not path.name.startswith("."))
