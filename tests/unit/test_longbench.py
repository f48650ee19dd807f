"""LongBench: prompts, truncation in the middle and the benchmark's own scores."""

from __future__ import annotations

import random

import pytest

from data_prep import longbench
from data_prep.longbench import TASKS, groups, prompt, score, truncated_ids
from tests.tiny_data import tiny_tokenizer


def test_categories():
    table = groups()
    assert len(TASKS) == 21 and len(table["LongBench"]) == 21
    sizes = {name: len(tasks) for name, tasks in table.items()}
    assert sizes["LongBench few-shot"] == 4 and sizes["LongBench few-shot, without samsum"] == 3
    assert sizes["LongBench summarisation, with samsum"] == 5
    categories = [name for name in table if name != "LongBench" and "samsum" not in name]
    assert sorted(task for name in categories for task in table[name]) == sorted(table["LongBench"])


def test_prompt_takes_both_field_names_and_the_benchmarks_ends():
    record = {"context": "Braces {{question}} stay.", "input": "Why?"}
    renamed = {"context": record["context"], "question": "Why?"}
    template = "Read.\n{{context}}\n{{question}}"
    assert prompt("trec", template, record) == "Read.\nBraces {{question}} stay.\nWhy?"
    assert prompt("trec", template, renamed) == prompt("trec", template, record)
    assert prompt("samsum", template, record) == "Read.\nBraces {{question}} stay.\n\nWhy?"
    assert prompt("lcc", "{{context}}Next line of code:", record).endswith("code:\n")
    assert prompt("passage_count", "The final answer is:", record) == "The final answer is: "


def test_long_prompts_lose_their_middle():
    tokenizer = tiny_tokenizer()
    text = " ".join(f"word{number}" for number in range(200))
    whole = truncated_ids(tokenizer, text, 10_000)
    short = truncated_ids(tokenizer, text, 101)
    assert tokenizer.decode(whole) == text
    expected = tokenizer.decode(whole[:50]) + tokenizer.decode(whole[-50:])
    assert tokenizer.decode(short) == expected


@pytest.mark.parametrize("metric", sorted({task.metric for task in TASKS.values()} - {"code"}))
def test_scores_are_those_of_the_harness(metric):
    """Its metrics are the benchmark's but for first lines and code, which have tests below."""
    from lm_eval.tasks.longbench import metrics as harness

    names = {
        "f1": "qa_f1_score", "f1_zh": "qa_f1_zh_score", "rouge": "rouge_score",
        "rouge_zh": "rouge_zh_score", "classification": "classification_score",
        "count": "count_score", "retrieval": "retrieval_score",
        "retrieval_zh": "retrieval_zh_score",
    }  # fmt: skip
    reference, own = getattr(harness, names[metric]), longbench.METRICS[metric]
    classes = ["red", "dark red", "blue", "3", "the cat"]
    pieces = ["the", "Cat", "sat!", "red", "dark red", "3", "12", "，", "中国", "会议", "a", ""]
    rng = random.Random(metric)
    compared = set()
    for _ in range(150):
        output = " ".join(rng.choices(pieces, k=rng.randint(0, 8)))
        answer = {
            "classification": rng.choice(classes), "count": "3",
            "retrieval": "Paragraph 12", "retrieval_zh": "段落12",
        }.get(metric, " ".join(rng.choices(pieces[:-1], k=rng.randint(1, 5))))  # fmt: skip
        value = reference(output, answer, all_classes=classes)
        assert own(output, answer, classes) == pytest.approx(value, abs=1e-12), (output, answer)
        compared.add(round(float(value), 3))
    assert len(compared) > 1


def test_only_the_first_line_counts_in_few_shot_tasks():
    assert score("triviaqa", "\nParis\nLondon Berlin", ["Paris"], []) == 1.0
    assert score("hotpotqa", "Paris\nLondon", ["Paris"], []) == pytest.approx(2 / 3)
    assert score("trec", "Location\nNumber", ["Location"], ["Location", "Number"]) == 1.0
    assert score("qasper", "", ["Paris"], []) == 0.0


def test_code_is_the_first_line_without_marks():
    output = "\n# a comment\n```\nx = 1\ny = 2"
    assert score("lcc", output, ["x = 1"], []) == 1.0
    assert score("lcc", "\n// only\n", ["x = 1"], []) == 0.0
    # A line of blanks is a line of code to the benchmark.
    assert score("lcc", "  \nx = 1", ["x = 1"], []) < 1.0
