"""Rows of the tasks of this folder, and scores of RULER's, for lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.tasks.needles import string_match
from data_prep.tasks.ruler import Corpus, make_rows, read_rows
from data_prep.text import haystack_words
from stages.evaluate.stage import NEW_TOKENS
from stages.evaluate.tasks.local import MAKERS


def rows(
    task: str,
    length: int = 4096,
    samples: int = 500,
    seed: int = 0,
    tokenizer: str | None = None,
    max_new_tokens: int | None = None,
    essay_dir: str | None = None,
    data_dir: str | None = None,
    files: str | None = None,
    **other: Any,
) -> dict[str, Any]:
    """The dataset of a task at a length: read from the folder `files`, or made with `tokenizer`."""
    from datasets import Dataset

    if files is not None:
        found = read_rows(Path(files, f"{task}-{length}.jsonl"))
    else:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer or other["pretrained"])
        new_tokens, folder = max_new_tokens or NEW_TOKENS[task], Path(data_dir or ".")
        if task in MAKERS:
            made = MAKERS[task](folder, length, samples, seed, new_tokens, loaded)
        else:
            corpus = Corpus(haystack_words(essay_dir), folder if data_dir else None)
            made = make_rows(
                task, length, samples, seed=seed, new_tokens=new_tokens, corpus=corpus,
                tokenizer=loaded,
            )  # fmt: skip
        found = list(made)
    return {"test": Dataset.from_list(found)}


def share_found(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's string_match_all."""
    return {"score": string_match(results[0], doc["answers"])}


def any_found(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's string_match_part."""
    return {"score": string_match(results[0], doc["answers"], any_answer=True)}
