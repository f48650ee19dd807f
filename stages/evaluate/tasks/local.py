"""Rows and scores of NoLiMa and MRCR, from folders in the layouts in which they are published."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from bosch.errors import UserError
from data_prep.text import encode_prompt, read_utf8

Row = dict[str, Any]
_DEPTHS = 26  # of a needle in each book


def nolima_rows(
    folder: Path, length: int, samples: int, seed: int, new_tokens: int, tokenizer: Any
) -> Iterator[Row]:
    """Needles whose questions share no words with them, in books (arXiv:2502.05167).

    Prompts are those of adobe-research/NoLiMa at commit 7532e4e: `length` tokens of a book with the
    needle at a line break, every needle at 26 depths of each book, of which `samples` are drawn.
    Neither needle, question nor answer count in the length. Raises UserError for a book that is too
    short, and for sets with distractors.
    """
    cases = []
    experiments = json.loads(read_utf8(folder / "needle_set.json"))
    books = sorted((folder / "haystack").rglob("*.txt"))
    for number, one in itertools.product(range(len(books)), experiments):
        if one.get("distractors"):
            raise UserError(f"{folder}: needle sets with distractors are not read")
        for kind, name in itertools.product(one["questions"], one["tests"]):
            rng = np.random.RandomState(42 + int(one["id"][:4]) + number)
            for percent in np.linspace(0, 100, _DEPTHS):
                answers = one["tests"][name].get("gold_answers")
                if "{CHAR}" in one["needle"]:
                    answers = [str(rng.choice(one["character_set"]))]
                cases.append((number, one, kind, name, float(percent) / 100, answers))
    texts = [tokenizer(read_utf8(book), add_special_tokens=False)["input_ids"] for book in books]
    ends = {i for i in set(itertools.chain(*texts)) if "\n" in tokenizer.decode([i])}
    chosen = np.random.default_rng([seed, length]).permutation(len(cases))[:samples]
    for number, one, kind, name, depth, answers in (cases[case] for case in sorted(chosen)):
        needle, question, ids = one["needle"], one["questions"][kind], texts[number]
        words = {str(place): word for place, word in enumerate(one["tests"][name]["input_args"], 1)}
        for mark, word in (words | {"CHAR": answers[0]}).items():
            needle, question = (text.replace(f"{{{mark}}}", word) for text in (needle, question))
        places = [0, *(place for place, i in enumerate(ids) if i in ends)]
        place = next((place for place in places if place / (length + 1) >= depth), -1)
        start = place - round(length * depth)
        if start < 0 or start + length > len(ids):
            raise UserError(f"{books[number]} is too short for {length:,} tokens at {depth:.0%}")
        before = tokenizer.decode(ids[start : place + 1])
        after = tokenizer.decode(ids[place + 1 : start + length])
        text = f"{before[: max(before.rfind(chr(10)), 0)]} {needle}\n{after}"
        prompt = one["task_template"].format(haystack=text, question=question)
        yield {"prompt": prompt, "prefix": "", "answers": answers, "needles": None}


def mrcr_rows(
    folder: Path, length: int, samples: int, seed: int, new_tokens: int, tokenizer: Any
) -> Iterator[Row]:
    """Repeat one of several answers to equal requests (openai/mrcr, arXiv:2409.12640).

    The first conversations that fit into `length` tokens with their answers, and not into half.
    """
    from datasets import load_dataset

    for kind, suffix in (("parquet", "parquet"), ("json", "jsonl")):
        files = sorted(map(str, folder.rglob(f"*.{suffix}")))
        rows = load_dataset(kind, data_files=files, split="train", streaming=True) if files else ()
        for row in rows if samples > 0 else ():
            turns = [f"{t['role'].capitalize()}: {t['content']}" for t in json.loads(row["prompt"])]
            prompt = "\n\n".join([*turns, "Assistant:"])
            if length / 2 < len(encode_prompt(tokenizer, prompt)) + new_tokens <= length:
                samples -= 1
                yield {
                    "prompt": prompt, "prefix": "", "answers": [row["answer"]], "needles": None,
                    "start": row["random_string_to_prepend"],
                }  # fmt: skip
            if samples == 0:
                break


MAKERS = {"nolima": nolima_rows, "mrcr": mrcr_rows}


def contained(doc: Row, results: list[str]) -> dict[str, float]:
    """NoLiMa's: whether the output has one of the answers, in the same case."""
    return {"score": float(any(answer in results[0] for answer in doc["answers"]))}


def repeated(doc: Row, results: list[str]) -> dict[str, float]:
    """MRCR's: how similar the output is to the answer, 0 unless it begins with the string asked."""
    output, start = results[0].strip(), doc["start"]
    if not output.startswith(start):
        return {"score": 0.0}
    answer = doc["answers"][0].removeprefix(start)
    return {"score": SequenceMatcher(None, output.removeprefix(start), answer).ratio()}
