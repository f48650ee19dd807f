"""Tables of the needle tasks, RULER's thirteen and HELMET's; importing it takes no time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Haystack = Literal["noise", "essay", "needles"]


@dataclass(frozen=True)
class TaskSpec:
    """Parameters of a needle task; `needles` is the number of keys."""

    haystack: Haystack
    key: Literal["words", "uuids"]
    value: Literal["numbers", "uuids"]
    needles: int
    values: int = 1
    queries: int = 1


NeedleTask = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
]
# Calibration asks these.
NEEDLES: dict[str, TaskSpec] = {
    "niah_single_1": TaskSpec("noise", "words", "numbers", 1),
    "niah_single_2": TaskSpec("essay", "words", "numbers", 1),
    "niah_single_3": TaskSpec("essay", "words", "uuids", 1),
    "niah_multikey_1": TaskSpec("essay", "words", "numbers", 4),
    "niah_multikey_2": TaskSpec("needles", "words", "numbers", 1),
    "niah_multikey_3": TaskSpec("needles", "uuids", "uuids", 1),
}
# RULER's thirteen (NVIDIA/RULER c3f5e3b).
RulerTask = Literal[
    NeedleTask, "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"
]
RULER_NEEDLES = {
    **NEEDLES,
    "niah_multivalue": TaskSpec("essay", "words", "numbers", 1, values=4),
    "niah_multiquery": TaskSpec("essay", "words", "numbers", 4, queries=4),
}
# Tokens a model may generate, inside the length.
NEW_TOKENS = {
    **dict.fromkeys(RULER_NEEDLES, 128),
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


HelmetTaskName = Literal["kilt_nq", "kilt_triviaqa", "kilt_hotpotqa", "kilt_popqa_3", "json_kv"]


class HelmetTask(NamedTuple):
    """Files of a task of HELMET (arXiv:2410.02694): `{k}` is the count of passages or pairs.

    `counts` are k by the tokens that a prompt takes, about. An answer has at most `new_tokens`, of
    which those behind a line's end are left out where `one_line`. `most_popular`: entities of a
    logarithm (base 10) of page views below that alone. A question that is drawn is asked with the
    right passage at `depths` places.
    """

    file: str
    examples: str | None
    counts: Mapping[int, int]
    new_tokens: int
    one_line: bool
    ending: str
    depths: int = 1
    most_popular: float | None = None


_PASSAGES = {8192: 50, 16384: 105, 32768: 220, 65536: 440, 131072: 1000}
_PAIRS = {8192: 105, 16384: 220, 32768: 440, 65536: 900, 131072: 1800}


def _rag(test: str, train: str, depths: int, most_popular: float | None = None) -> HelmetTask:
    return HelmetTask(
        f"kilt/{test}_1000_k{{k}}_dep{depths}.jsonl",
        f"kilt/{train}_1000_k3_dep{depths}.jsonl",
        _PASSAGES, 20, True, "\nAnswer:", depths, most_popular,
    )  # fmt: skip


HELMET_TASKS: dict[HelmetTaskName, HelmetTask] = {
    "kilt_nq": _rag("nq-dev-multikilt", "nq-train-multikilt", 6),
    "kilt_triviaqa": _rag("triviaqa-dev-multikilt", "triviaqa-train-multikilt", 6),
    "kilt_hotpotqa": _rag("hotpotqa-dev-multikilt", "hotpotqa-train-multikilt", 3),
    "kilt_popqa_3": _rag("popqa_test", "popqa_test", 6, 3.0),
    "json_kv": HelmetTask("json_kv/test_k{k}_dep6.jsonl", None, _PAIRS, 100, False,
                    "\nCorresponding value:"),
}  # fmt: skip
