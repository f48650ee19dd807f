"""HELMET's tasks and their files; importing it takes no time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

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
