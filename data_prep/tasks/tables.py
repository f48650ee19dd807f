"""Tables of the needle tasks and of RULER's thirteen tasks; imports only the standard library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class TaskSpec(NamedTuple):
    """Parameters of a needle task."""

    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"]
    value: Literal["numbers", "uuids"]
    keys: int
    values: int = 1
    queries: int = 1


# Tasks of a calibration set.
NEEDLES: dict[str, TaskSpec] = {
    "niah_single_1": TaskSpec("noise", "words", "numbers", 1),
    "niah_single_2": TaskSpec("essay", "words", "numbers", 1),
    "niah_single_3": TaskSpec("essay", "words", "uuids", 1),
    "niah_multikey_1": TaskSpec("essay", "words", "numbers", 4),
    "niah_multikey_2": TaskSpec("needles", "words", "numbers", 1),
    "niah_multikey_3": TaskSpec("needles", "uuids", "uuids", 1),
}
# Prompts for each of its examples, since the model answers some of them wrongly.
PROMPTS_PER_EXAMPLE = 2
# RULER's needle tasks (NVIDIA/RULER c3f5e3b).
RULER_NEEDLES = {
    **NEEDLES,
    "niah_multivalue": TaskSpec("essay", "words", "numbers", 1, values=4),
    "niah_multiquery": TaskSpec("essay", "words", "numbers", 4, queries=4),
}
# Generated tokens, counted inside the length (RULER's tokens_to_generate).
NEW_TOKENS = {
    **dict.fromkeys(RULER_NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32
}  # fmt: skip
# Tasks in which one answer is enough; in others the score is the share of the answers.
ANY_ANSWER = frozenset({"qa_1", "qa_2"})
# Files that RULER downloads.
DATA_FILES = {"qa_1": "squad.json", "qa_2": "hotpotqa.json", "cwe": "english_words.json"}

if TYPE_CHECKING:
    NeedleTask = str
    RulerTask = str
else:
    NeedleTask, RulerTask = Literal[*NEEDLES], Literal[*NEW_TOKENS]
