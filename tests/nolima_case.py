"""A needle set and two books of this project's own, in NoLiMa's layout, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "Read this:\n\n{haystack}\n\nNow answer {{briefly}}: {question}\nAnswer:"
NEEDLE_SET = [
    {
        "id": "0401",
        "system_prompt": "",
        "needle": "A note said that {CHAR} keeps a {1} at home.",
        "questions": {"onehop": "Who owns a {2}?", "twohop": "Who could lend a {3}?"},
        "character_set": ["Yuki", "Mandy", "Caleb", "Diana"],
        "tests": {
            "T1": {"input_args": ["lute", "string instrument", "bow"]},
            "T2": {"input_args": ["oar", "thing for boats", "paddle"]},
        },
        "task_template": TEMPLATE,
    },
    {
        "id": "0402b",
        "system_prompt": "Be short.",
        "needle": "On the table lay a {1}.",
        "questions": {"direct": "What lay there?"},
        "distractors": {"direct": "In the garden lay a {2}."},
        "tests": {"T1": {"input_args": ["lamp", "rake"], "gold_answers": ["lamp", "light"]}},
        "task_template": TEMPLATE,
    },
]


def tokenizer() -> Any:
    """Every byte is a token, so tokens are the same everywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def books() -> dict[str, str]:
    """Two books without equal lines."""
    return {
        f"book_{number}.txt": "\n".join(
            f"Line {line} of book {number} tells of {line * 7919 % 1009} stones"
            f" and {line * 104729 % 977} birds{' by the sea' * (line % 3)}."
            for line in range(400)
        )
        for number in (1, 2)
    }


def write_case(folder: Path) -> None:
    """The data in the layout of upstream's download."""
    (folder / "haystack").mkdir(parents=True)
    (folder / "needle_set.json").write_text(json.dumps(NEEDLE_SET))
    for name, text in books().items():
        (folder / "haystack" / name).write_text(text)
