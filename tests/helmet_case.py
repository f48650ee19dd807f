"""A small folder in the layout of HELMET's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.folders import write_jsonl


def write_case(folder: Path, questions: int = 3) -> Path:
    """Write `questions` questions a task and twice as many JSON objects of four pairs to `folder`.

    Each question has two passages and stands twice: with the right passage first, then second.
    """
    for task, dep in (("nq-dev-multikilt", 6), ("triviaqa-dev-multikilt", 6), ("popqa_test", 6),
                      ("hotpotqa-dev-multikilt", 3)):  # fmt: skip
        rows = [_row(task, number, depth) for number in range(questions) for depth in range(2)]
        write_jsonl(folder / "kilt" / f"{task}_1000_k50_dep{dep}.jsonl", rows)
        train = task.replace("dev", "train")
        rows = [_row(train, number, 0) for number in (0, 0, 1, 2, 3)]
        write_jsonl(folder / "kilt" / f"{train}_1000_k3_dep{dep}.jsonl", rows)
    write_jsonl(
        folder / "json_kv" / "test_k105_dep6.jsonl", [_pairs(n) for n in range(2 * questions)]
    )
    return folder


def _row(task: str, number: int, depth: int) -> dict[str, Any]:
    """Question `number` with its right passage at place `depth`, 0 or 1."""
    passages = [
        {
            "title": f"Island {number}",
            "text": f"The island {number} of {task} has {number} tapirs.",
        },
        {"title": "Weather", "text": "It rains in the north."},
    ]
    row = {
        "question": f"How many tapirs has island {number} of {task}?",
        "answers": [f"The {number} tapirs", f"{number} of them"],
        "ctxs": passages if depth == 0 else passages[::-1],
    }
    if task.startswith("popqa"):
        row |= {"id": 7 * number, "s_pop": 10**5 if number == 1 else 10}
    return row


def _pairs(number: int) -> dict[str, Any]:
    pairs = {f"key-{number}-{index}": f"value-{index}" for index in range(4)}
    return {
        "context": "JSON data:\n" + json.dumps(pairs),
        "question": f"key-{number}-1",
        "answer": "value-1",
        "demos": [[f"key-{number}-{index}", f"value-{index}"] for index in (2, 3, 0)],
        "num_kvs": 4,
    }
