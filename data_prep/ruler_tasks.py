"""The tables of RULER's thirteen tasks (NVIDIA/RULER c3f5e3b); importing it takes no time."""

from __future__ import annotations

from typing import Literal

from data_prep.needles import TASKS, TaskSpec

NEEDLE_SPECS = {
    **TASKS,
    "niah_multivalue": TaskSpec("essay", "words", "numbers", 1, values=4),
    "niah_multiquery": TaskSpec("essay", "words", "numbers", 4, queries=4),
}
# Tokens a model may generate, inside the length.
NEW_TOKENS = {
    **dict.fromkeys(NEEDLE_SPECS, 128),
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa_1": 32,
    "qa_2": 32,
}
# Any one of the answers is enough; elsewhere the score is the share of the answers.
ANY_ANSWER = frozenset({"qa_1", "qa_2"})
# What RULER downloads, under the names it gives the files.
DATA_FILES = {"qa_1": "squad.json", "qa_2": "hotpotqa.json", "cwe": "english_words.json"}


NeedleTask = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
]
RulerTask = Literal[
    NeedleTask, "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"
]
