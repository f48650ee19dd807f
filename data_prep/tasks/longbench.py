"""LongBench v1 (THUDM/LongBench at commit 2e00731): its tasks, prompts, truncation and metrics.

The prompts are lm-evaluation-harness's, corrected where they differ from the benchmark's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from data_prep.text import encode_prompt


class LongBenchTask(NamedTuple):
    """A task: lm-eval's name of its metric, most tokens of an answer, and its category."""

    metric: str
    max_new_tokens: int
    category: str


# lm-eval's names are longbench_<task>; tasks of LongBench-E, with other documents, end in _e.
PREFIX, _E_SUFFIX = "longbench_", "_e"
_SINGLE, _MULTI = "single-document QA", "multi-document QA"
_SUMMARY, _FEW_SHOT, _SYNTHETIC, _CODE = "summarisation", "few-shot", "synthetic", "code"
TASKS = {
    "narrativeqa": LongBenchTask("qa_f1_score", 128, _SINGLE),
    "qasper": LongBenchTask("qa_f1_score", 128, _SINGLE),
    "multifieldqa_en": LongBenchTask("qa_f1_score", 64, _SINGLE),
    "multifieldqa_zh": LongBenchTask("qa_f1_zh_score", 64, _SINGLE),
    "hotpotqa": LongBenchTask("qa_f1_score", 32, _MULTI),
    "2wikimqa": LongBenchTask("qa_f1_score", 32, _MULTI),
    "musique": LongBenchTask("qa_f1_score", 32, _MULTI),
    "dureader": LongBenchTask("rouge_zh_score", 128, _MULTI),
    "gov_report": LongBenchTask("rouge_score", 512, _SUMMARY),
    "qmsum": LongBenchTask("rouge_score", 512, _SUMMARY),
    "multi_news": LongBenchTask("rouge_score", 512, _SUMMARY),
    "vcsum": LongBenchTask("rouge_zh_score", 512, _SUMMARY),
    "trec": LongBenchTask("classification_score", 64, _FEW_SHOT),
    "triviaqa": LongBenchTask("qa_f1_score", 32, _FEW_SHOT),
    "samsum": LongBenchTask("rouge_score", 128, _FEW_SHOT),
    "lsht": LongBenchTask("classification_score", 64, _FEW_SHOT),
    "passage_count": LongBenchTask("count_score", 32, _SYNTHETIC),
    "passage_retrieval_en": LongBenchTask("retrieval_score", 32, _SYNTHETIC),
    "passage_retrieval_zh": LongBenchTask("retrieval_zh_score", 32, _SYNTHETIC),
    "lcc": LongBenchTask("code_sim_score", 64, _CODE),
    "repobench-p": LongBenchTask("code_sim_score", 64, _CODE),
}
FIRST_LINE_ONLY = frozenset({"trec", "triviaqa", "samsum", "lsht"})
# Prompts that the model continues, to which the benchmark applies no chat template.
NO_CHAT = FIRST_LINE_ONLY | {"lcc", "repobench-p"}
# Ends of prompts that differ: lm-eval's (0.4.13), then the benchmark's.
_PROMPT_ENDS = {
    "triviaqa": ("\n{{question}}", "\n\n{{question}}"),
    "samsum": ("\n{{question}}", "\n\n{{question}}"),
    "passage_count": ("", " "),
    "passage_retrieval_en": ("", " "),
    "lcc": ("", "\n"),
    "repobench-p": ("", "\n"),
}


def is_v1(name: str) -> bool:
    """Whether lm-eval's task of this name is one of the 21 of LongBench v1."""
    return name.startswith(PREFIX) and name.removeprefix(PREFIX) in TASKS


def task_of(name: str) -> str | None:
    """The key in `TASKS` for lm-eval's task, also for LongBench-E; None outside LongBench."""
    v1_name = name.removesuffix(_E_SUFFIX)
    return v1_name.removeprefix(PREFIX) if is_v1(v1_name) else None


def groups() -> dict[str, list[str]]:
    """lm-eval's names of the tasks in each average: all, each category, and two of the paper's."""
    categories, papers = _categories(), _categories_of_paper()
    return {
        "LongBench": [name for names in categories.values() for name in names],
        **{f"LongBench {category}": names for category, names in categories.items()},
        f"LongBench {_FEW_SHOT}, without samsum": papers[_FEW_SHOT],
        f"LongBench {_SUMMARY}, with samsum": papers[_SUMMARY],
    }


def category_means() -> dict[str, list[list[str]]]:
    """For each mean over categories, lm-eval's names of the tasks in each category.

    First the benchmark's score, then BOSCH's (B.6) with GSM8K as seventh category.
    """
    return {
        "LongBench, mean of the categories": [*_categories().values()],
        "LongBench and GSM8K, mean of the paper's categories": [
            *_categories_of_paper().values(), ["gsm8k"],
        ],
    }  # fmt: skip


def _categories() -> dict[str, list[str]]:
    categories: dict[str, list[str]] = {}
    for name, task in TASKS.items():
        categories.setdefault(task.category, []).append(f"{PREFIX}{name}")
    return categories


def _categories_of_paper() -> dict[str, list[str]]:
    """Categories of the paper, which counts samsum among the summaries, not as few-shot."""
    categories, samsum = _categories(), f"{PREFIX}samsum"
    few_shot = [name for name in categories[_FEW_SHOT] if name != samsum]
    return categories | {_FEW_SHOT: few_shot, _SUMMARY: [*categories[_SUMMARY], samsum]}


def check_record(record: Mapping[str, Any]) -> None:
    """Raise ValueError if a record lacks a field for prompt or score."""
    for name in ("context", "answers", "all_classes"):
        if name not in record:
            raise ValueError(f"lacks the field {name}")
    for name, value in (("context", record["context"]), ("question", _question(record))):
        if not isinstance(value, str):
            raise ValueError(f"{name} is no text")
    classes = [] if record["all_classes"] is None else record["all_classes"]
    for name, value in (("answers", record["answers"]), ("all_classes", classes)):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{name} is no list of texts")


def prompt(task: str, template: str, record: Mapping[str, Any]) -> str:
    """The benchmark's prompt for a record; `template` is lm-eval's `doc_to_text`.

    The question is in the field `input` or `question`, depending on the copy of the data.
    """
    harness_end, benchmark_end = _PROMPT_ENDS.get(task, ("", ""))
    if not template.endswith(benchmark_end):  # a later lm-eval may have the right end
        template = template.removesuffix(harness_end) + benchmark_end
    # Split before inserting texts, since the context may have braces.
    fields = {"{{context}}": str(record["context"]), "{{question}}": str(_question(record))}
    texts = re.split(r"(\{\{context\}\}|\{\{question\}\})", template)
    return "".join(fields.get(text, text) for text in texts)


def _question(record: Mapping[str, Any]) -> Any:
    return record["input"] if "input" in record else record.get("question", "")


def truncated_ids(tokenizer: Any, text: str, max_length: int) -> list[int]:
    """Token ids of a prompt; a longer one keeps its first and last `max_length // 2` tokens.

    As in the benchmark, these are decoded without special tokens and tokenised again, which may
    change their number a little.
    """
    ids = encode_prompt(tokenizer, text)
    if len(ids) <= max_length:
        return ids
    half = max_length // 2
    halves = ids[:half], ids[len(ids) - half :]
    texts = [tokenizer.decode(part, skip_special_tokens=True) for part in halves]
    return encode_prompt(tokenizer, "".join(texts))


def score(
    task: str, output: str, answers: Sequence[str], all_classes: Sequence[str] | None
) -> float:
    """The best score of the output against any of the answers, in [0, 1]; 0 without answers.

    `all_classes` are the labels of a classification task.
    """
    # lm-eval has the benchmark's metrics, but chooses other lines of the output.
    from lm_eval.tasks.longbench import metrics

    if task in FIRST_LINE_ONLY:
        output = output.lstrip("\n").split("\n")[0]
    name = TASKS[task].metric
    if name == "code_sim_score":
        # The benchmark counts a blank line as code; lm-eval skips it.
        lines = output.lstrip("\n").split("\n")
        output = next((line for line in lines if not re.search("`|#|//", line)), "")
        scores = [_similarity(output, answer) for answer in answers]
    else:
        metric = getattr(metrics, name)
        scores = [metric(output, answer, all_classes=all_classes or ()) for answer in answers]
    return float(max(scores, default=0.0))


def _similarity(output: str, answer: str) -> float:
    """The `fuzz.ratio` of the benchmark's fuzzywuzzy, in hundredths.

    With python-Levenshtein installed, fuzzywuzzy would use another matcher.
    """
    return round(100 * SequenceMatcher(None, output, answer).ratio()) / 100
