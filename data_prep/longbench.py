"""LongBench v1 (THUDM/LongBench at commit 2e00731): its tasks, prompts, truncation and metrics.

The prompts are lm-evaluation-harness's, corrected where they differ from the benchmark's own.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from data_prep.needles import encode_prompt


class LongBenchTask(NamedTuple):
    """A task: its metric, most new tokens, and its category."""

    metric: str
    new_tokens: int
    category: str


# How lm-eval's names of the tasks begin; those of LongBench-E, on other documents, end in _e.
PREFIX, _EVEN = "longbench_", "_e"
_SINGLE, _MULTI = "single-document QA", "multi-document QA"
_SUMMARY, _FEW_SHOT, _SYNTHETIC, _CODE = "summarisation", "few-shot", "synthetic", "code"
TASKS = {
    "narrativeqa": LongBenchTask("f1", 128, _SINGLE),
    "qasper": LongBenchTask("f1", 128, _SINGLE),
    "multifieldqa_en": LongBenchTask("f1", 64, _SINGLE),
    "multifieldqa_zh": LongBenchTask("f1_zh", 64, _SINGLE),
    "hotpotqa": LongBenchTask("f1", 32, _MULTI),
    "2wikimqa": LongBenchTask("f1", 32, _MULTI),
    "musique": LongBenchTask("f1", 32, _MULTI),
    "dureader": LongBenchTask("rouge_zh", 128, _MULTI),
    "gov_report": LongBenchTask("rouge", 512, _SUMMARY),
    "qmsum": LongBenchTask("rouge", 512, _SUMMARY),
    "multi_news": LongBenchTask("rouge", 512, _SUMMARY),
    "vcsum": LongBenchTask("rouge_zh", 512, _SUMMARY),
    "trec": LongBenchTask("classification", 64, _FEW_SHOT),
    "triviaqa": LongBenchTask("f1", 32, _FEW_SHOT),
    "samsum": LongBenchTask("rouge", 128, _FEW_SHOT),
    "lsht": LongBenchTask("classification", 64, _FEW_SHOT),
    "passage_count": LongBenchTask("count", 32, _SYNTHETIC),
    "passage_retrieval_en": LongBenchTask("retrieval", 32, _SYNTHETIC),
    "passage_retrieval_zh": LongBenchTask("retrieval_zh", 32, _SYNTHETIC),
    "lcc": LongBenchTask("code", 64, _CODE),
    "repobench-p": LongBenchTask("code", 64, _CODE),
}
FIRST_LINE_ONLY = frozenset({"trec", "triviaqa", "samsum", "lsht"})
# Where the harness's prompts (lm-eval 0.4.13) are not the benchmark's.
_PROMPT_ENDS = {
    "triviaqa": ("\n{{question}}", "\n\n{{question}}"),
    "samsum": ("\n{{question}}", "\n\n{{question}}"),
    "passage_count": ("", " "),
    "passage_retrieval_en": ("", " "),
    "lcc": ("", "\n"),
    "repobench-p": ("", "\n"),
}
_CJK_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟"
    "〰〾〿–—‘’‛“”„‟…‧﹏."
)


def is_v1(name: str) -> bool:
    """Whether lm-eval's task of this name is one of the 21 of LongBench v1."""
    return name.startswith(PREFIX) and name.removeprefix(PREFIX) in TASKS


def task_of(name: str) -> str | None:
    """The task whose prompt and metric lm-eval's task has; None for one that is no LongBench's."""
    for one in (name, name.removesuffix(_EVEN)):
        if is_v1(one):
            return one.removeprefix(PREFIX)
    return None


def groups() -> dict[str, list[str]]:
    """Tasks of the averages: all, the categories, and the two the paper draws otherwise.

    The benchmark counts samsum among the few-shot tasks, the paper among the summaries.
    """
    tables = {"LongBench": list(TASKS)}
    for category in dict.fromkeys(task.category for task in TASKS.values()):
        name = f"LongBench {category}"
        tables[name] = [name for name, task in TASKS.items() if task.category == category]
    few_shot = [name for name in tables[f"LongBench {_FEW_SHOT}"] if name != "samsum"]
    tables[f"LongBench {_FEW_SHOT}, without samsum"] = few_shot
    summaries = [*tables[f"LongBench {_SUMMARY}"], "samsum"]
    tables[f"LongBench {_SUMMARY}, with samsum"] = summaries
    return {name: [f"{PREFIX}{task}" for task in tasks] for name, tasks in tables.items()}


def prompt(task: str, template: str, record: Mapping[str, Any]) -> str:
    """The benchmark's prompt; `template` is the harness's `doc_to_text`.

    One public copy calls a record's field `input`, the other `question`.
    """
    before, after = _PROMPT_ENDS.get(task, ("", ""))
    template = template.removesuffix(before) + after
    question = record["input"] if "input" in record else record.get("question", "")
    # The context may hold braces of its own: split before anything is put in.
    fields = {"{{context}}": str(record["context"]), "{{question}}": str(question)}
    texts = re.split(r"(\{\{context\}\}|\{\{question\}\})", template)
    return "".join(fields.get(text, text) for text in texts)


def truncated_ids(tokenizer: Any, text: str, max_length: int) -> list[int]:
    """Token ids of a prompt; of one that is too long the first and the last half are kept.

    Decoded without special tokens and tokenised again, as the benchmark does.
    """
    ids = encode_prompt(tokenizer, text)
    if len(ids) <= max_length:
        return ids
    half = max_length // 2
    ends = [
        tokenizer.decode(half_ids, skip_special_tokens=True)
        for half_ids in (ids[:half], ids[-half:])
    ]
    return encode_prompt(tokenizer, "".join(ends))


def score(task: str, output: str, answers: Sequence[str], all_classes: Sequence[str]) -> float:
    """The best score of the output against any of the answers, in [0, 1]."""
    if task in FIRST_LINE_ONLY:
        output = output.lstrip("\n").split("\n")[0]
    metric = METRICS[TASKS[task].metric]
    return max((metric(output, answer, all_classes or ()) for answer in answers), default=0.0)


def _f1(output: str, answer: str, classes: Sequence[str]) -> float:
    return _overlap(_normal(output).split(), _normal(answer).split())


def _normal(text: str) -> str:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1_zh(output: str, answer: str, classes: Sequence[str]) -> float:
    drop = set(string.punctuation + _CJK_PUNCTUATION)

    def words(text: str) -> list[str]:
        pieces = ("".join(c for c in word.lower() if c not in drop) for word in _cut(text))
        normal = ("".join(piece.split()) for piece in pieces)
        return [word for word in normal if word]

    return _overlap(words(output), words(answer))


def _overlap(output: list[str], answer: list[str]) -> float:
    same = sum((Counter(output) & Counter(answer)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(output), same / len(answer)
    return 2 * precision * recall / (precision + recall)


def _cut(text: str) -> list[str]:
    import jieba

    return list(jieba.cut(text, cut_all=False))


def _rouge(output: str, answer: str, classes: Sequence[str]) -> float:
    from rouge import Rouge

    try:
        value: float = Rouge().get_scores([output], [answer], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):  # the package refuses texts without a word
        return 0.0
    return value


def _rouge_zh(output: str, answer: str, classes: Sequence[str]) -> float:
    return _rouge(" ".join(_cut(output)), " ".join(_cut(answer)), classes)


def _classification(output: str, answer: str, classes: Sequence[str]) -> float:
    matches = [name for name in classes if name in output]
    # The benchmark removes from the list it goes through, and so skips the name behind.
    for name in matches:
        if name in answer and name != answer:
            matches.remove(name)
    return 1.0 / len(matches) if answer in matches else 0.0


def _count(output: str, answer: str, classes: Sequence[str]) -> float:
    numbers = re.findall(r"\d+", output)
    return sum(number == str(answer) for number in numbers) / len(numbers) if numbers else 0.0


def _retrieval(pattern: str) -> Callable[[str, str, Sequence[str]], float]:
    def metric(output: str, answer: str, classes: Sequence[str]) -> float:
        return _count(output, re.findall(pattern, answer)[0], classes)

    return metric


def _code(output: str, answer: str, classes: Sequence[str]) -> float:
    from fuzzywuzzy import fuzz

    lines = output.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return float(fuzz.ratio(next(code, ""), answer)) / 100


METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "f1": _f1,
    "f1_zh": _f1_zh,
    "rouge": _rouge,
    "rouge_zh": _rouge_zh,
    "classification": _classification,
    "count": _count,
    "retrieval": _retrieval(r"Paragraph (\d+)"),
    "retrieval_zh": _retrieval(r"段落(\d+)"),
    "code": _code,
}
