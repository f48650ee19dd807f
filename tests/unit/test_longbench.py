"""LongBench: prompts, truncation in the middle and the benchmark's own scores."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from data_prep.tasks.longbench import (
    NO_CHAT,
    TASKS,
    category_means,
    groups,
    prompt,
    score,
    truncated_ids,
)
from tests.tiny_data import tiny_tokenizer


def test_categories_of_tasks():
    """test_tasks_equal_lm_evals checks those of single tasks."""
    sizes = {name: len(tasks) for name, tasks in groups().items()}
    assert sizes["LongBench"] == 21 and sizes["LongBench few-shot, without samsum"] == 3
    assert sizes["LongBench summarisation, with samsum"] == 5


def test_means_over_categories_are_those_of_benchmark_and_paper():
    benchmark, paper = category_means().values()
    assert [len(tasks) for tasks in benchmark] == [4, 4, 4, 4, 3, 2]
    # Samsum counts as a summary there, and GSM8K is the seventh category (BOSCH B.6).
    assert [len(tasks) for tasks in paper] == [4, 4, 5, 3, 3, 2, 1]
    assert "longbench_samsum" in paper[2] and paper[-1] == ["gsm8k"]


def test_tasks_equal_lm_evals():
    """Length of answers, metrics, and groups of tasks."""
    tags = {}
    for task, ours in TASKS.items():
        text = (files("lm_eval") / "tasks" / "longbench" / f"{task}.yaml").read_text()
        assert ours.max_new_tokens == int(re.search(r"max_gen_toks: (\d+)", text)[1])
        assert ours.metric == f"{re.search(r'metrics.get_(.+)_with_score', text)[1]}_score"
        tags.setdefault(re.search(r"longbench_(\w+)_tasks", text)[1], []).append(task)
    found = [tasks for name, tasks in groups().items() if " " in name and "samsum" not in name]
    assert sorted(map(sorted, found)) == sorted(
        sorted(f"longbench_{task}" for task in tasks) for tasks in tags.values()
    )


def test_prompts_accept_both_field_names_and_have_the_benchmarks_ends():
    record = {"context": "Braces {{question}} stay.", "input": "Why?"}
    renamed = {"context": record["context"], "question": "Why?"}
    template = "Read.\n{{context}}\n{{question}}"
    assert prompt("trec", template, record) == "Read.\nBraces {{question}} stay.\nWhy?"
    assert prompt("trec", template, renamed) == prompt("trec", template, record)
    assert prompt("samsum", template, record) == "Read.\nBraces {{question}} stay.\n\nWhy?"
    for end in ("", "\n"):
        assert prompt("lcc", f"{{{{context}}}}Next line:{end}", record).endswith("line:\n")
    right = "Read.\n{{context}}\n\n{{question}}"
    assert prompt("samsum", right, record) == prompt("samsum", template, record)
    assert prompt("triviaqa", template, record) == prompt("samsum", template, record)
    assert prompt("repobench-p", "{{context}}", record) == f"{record['context']}\n"
    for task in ("passage_count", "passage_retrieval_en"):
        assert prompt(task, "The final answer is:", record) == "The final answer is: "
    # As in its pred.py.
    assert {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"} == NO_CHAT


def test_long_prompts_lose_their_middle():
    tokenizer = tiny_tokenizer()
    text = " ".join(f"word{number}" for number in range(200))
    whole = truncated_ids(tokenizer, text, 10_000)
    short = truncated_ids(tokenizer, text, 101)
    assert tokenizer.decode(whole) == text
    expected = tokenizer.decode(whole[:50]) + tokenizer.decode(whole[-50:])
    assert tokenizer.decode(short) == expected
    assert truncated_ids(tokenizer, text, 1) == []  # halves that end within a token


@pytest.mark.parametrize(
    ("task", "output", "answers", "classes", "expected"),
    [
        ("narrativeqa", "The cat, it sat.", ["a dog", "cat sat"], None, 0.8),
        ("multifieldqa_zh", "会议，在中国", ["中国"], None, 0.5),
        ("gov_report", "the cat sat", ["the cat sat"], None, 1.0),
        ("gov_report", "", ["the cat sat"], None, 0.0),
        ("vcsum", "中国", ["中国"], None, 1.0),
        ("lsht", "dark red", ["red"], ["red", "dark red"], 0.5),
        ("passage_count", "3 or 4", ["3"], None, 0.5),
        ("passage_retrieval_en", "Paragraph 12", ["Paragraph 12"], None, 1.0),
        ("passage_retrieval_zh", "段落2", ["段落12"], None, 0.0),
        ("qasper", "Paris", [], None, 0.0),
    ],
)
def test_scores_equal_the_benchmarks(task, output, answers, classes, expected):
    assert score(task, output, answers, classes) == pytest.approx(expected, abs=1e-6)


def test_only_the_first_line_counts_in_few_shot_tasks():
    assert score("triviaqa", "\nParis\nLondon Berlin", ["Paris"], []) == 1.0
    assert score("hotpotqa", "Paris\nLondon", ["Paris"], []) == pytest.approx(2 / 3)
    for task in ("trec", "lsht"):
        assert score(task, "Location\nNumber", ["Location"], ["Location", "Number"]) == 1.0
    assert score("samsum", "the cat\nsat", ["the cat"], []) == pytest.approx(1.0)
    assert score("qasper", "", ["Paris"], []) == 0.0


def test_a_code_answer_is_its_first_line_without_marks():
    output = "\n# a comment\n```\nx = 1\ny = 2"
    assert score("lcc", output, ["x = 1"], []) == 1.0
    assert score("lcc", "\n// only\n", ["x = 1"], []) == 0.0
    # For the benchmark a line of blanks is a line of code.
    assert score("lcc", "  \nx = 1", ["x = 1"], []) < 1.0


@pytest.mark.parametrize(
    ("output", "answer", "expected"),
    [
        ("    return self.value + other", "        return other.value + self.value", 0.62),
        ("x = np.zeros((batch, heads))", "y = torch.zeros(heads, batch)", 0.56),
        ("x = 1", "x = 1", 1.0),
        ("", "x = 1", 0.0),
    ],
)
def test_installed_packages_do_not_change_the_similarity_of_code(
    monkeypatch, output, answer, expected
):
    """With python-Levenshtein fuzzywuzzy's ratio of the first pair would be 0.65."""
    monkeypatch.setattr("fuzzywuzzy.fuzz.ratio", lambda *_: 50)
    assert score("lcc", output, [answer], []) == expected


def test_a_prompt_of_exactly_the_longest_length_is_not_changed():
    """Decoding and tokenising it again could change it."""

    class Words:
        eos_token_id = None

        def __call__(self, text, **options):
            return {"input_ids": text.split()}

        def decode(self, ids, *, skip_special_tokens):
            return " ".join([f"cut {skip_special_tokens}", *ids])

    assert truncated_ids(Words(), "a b c d", 4) == ["a", "b", "c", "d"]
    assert truncated_ids(Words(), "a b c d e", 4)[:3] == ["cut", "True", "a"]
