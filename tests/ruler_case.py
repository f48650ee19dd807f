"""Text and questions for RULER's samples, the same on every machine."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from data_prep.tasks.words import ADJECTIVES, NOUNS

TOKENIZER = Path(__file__).parent.parent / "recipes/quickstart/base_model"


def essay_text(words: int = 6000) -> str:
    """Sentences of random words, about `words` in all."""
    rng = Random(1)
    parts: list[str] = []
    while sum(map(len, parts)) < 6 * words:
        sentence = " ".join(rng.choice(NOUNS + ADJECTIVES) for _ in range(rng.randint(4, 18)))
        parts.append(f"{sentence.capitalize()}{rng.choice('..!?')}")
    return " ".join(parts)


def write_data(folder: Path, questions: int = 60) -> Path:
    """SQuAD and HotpotQA in the form in which RULER has them.

    HotpotQA has `questions` questions, SQuAD twice as many, some three in ten unanswerable.
    """
    rng = Random(2)
    folder.mkdir(parents=True, exist_ok=True)

    def prose(count: int) -> str:
        return " ".join(rng.choice(NOUNS) for _ in range(count)) + "."

    articles = [
        {
            "paragraphs": [
                {
                    "context": prose(rng.randint(20, 60)),
                    "qas": [
                        {
                            "question": f"Which {rng.choice(NOUNS)}?",
                            "answers": [{"text": rng.choice(NOUNS)} for _ in range(2)],
                            "is_impossible": rng.random() < 0.3,
                        }
                        for _ in range(2)
                    ],
                }
                for _ in range(4)
            ]
        }
        for _ in range(questions // 4)
    ]
    hotpot = [
        {
            "question": f"Which {rng.choice(NOUNS)} of two?",
            "answer": rng.choice(NOUNS),
            "context": [
                [rng.choice(NOUNS), [prose(8), prose(rng.randint(5, 12))]] for _ in range(10)
            ],
        }
        for _ in range(questions)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    (folder / "hotpotqa.json").write_text(json.dumps(hotpot))
    return folder
