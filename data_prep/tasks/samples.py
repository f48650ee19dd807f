"""RULER's samples of a task at a length, as rows of a file that all processes and models read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import write_text
from data_prep.tasks.ruler import Corpus, ruler_task
from data_prep.text import TokenCounter


def make_rows(
    task: str,
    length: int,
    count: int,
    *,
    seed: int,
    new_tokens: int,
    corpus: Corpus,
    tokenizer: Any,
) -> Iterator[dict[str, Any]]:
    """Samples whose prompt and answer fit into `length` tokens.

    The model continues `prompt` and `prefix`, the beginning of the answer; `answers` are the texts
    to look for, `needles` the hidden pairs. Raises UserError if the task does not fit, or a
    required file is missing or damaged.
    """
    try:
        samples = ruler_task(task, corpus, seed, length, new_tokens, TokenCounter(tokenizer))
        samples.fit()
        for index in range(count):
            draft = samples.sample(index)
            yield {
                "length": length, "prompt": draft.prompt, "prefix": draft.prefix,
                "answers": draft.answers, "needles": draft.needles,
            }  # fmt: skip
    except UserError as fault:
        raise UserError(f"{task} at {length:,} tokens: {fault}") from None


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write rows where `read_rows` reads them, atomically."""
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
