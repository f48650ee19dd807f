"""Presets: every benchmark on small data in its public layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from bosch.errors import UserError
from stages.evaluate.presets import PRESETS
from stages.evaluate.suites.harness import HarnessEvaluation
from stages.evaluate.suites.harness.tasks import (
    leaf_configs,
    load_tasks,
    mean_metrics,
    refuse_unscorable,
)

# The folders of lm-eval that contain the presets' tasks; its whole index takes seconds.
FOLDERS = (
    "mmlu", "arc", "hellaswag", "winogrande", "gsm8k", "longbench", "longbench2",
    "longproc", "graphwalks", "infinitebench", "minerva_math", "aime",
)  # fmt: skip
FOUR = {"question": "Which?", "choices": [*"wxyz"]}
LONG_ROW = {"id": 1, "context": "A long text.", "input": "Which?", "options": ["red", "blue"]}
PROC = {"input_prompt": "Do it.", "metadata": json.dumps({"ground_truth_cities": "Oslo**Rome",
        "ground_truth_durations": "2**3"})}  # fmt: skip

# By task: its splits, a record of the public data, and a right answer. An index means that choice.
# stands for the choice that is right.
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any], str | int]] = {
    "mmlu_anatomy": (("test", "dev"), {**FOUR, "answer": 1}, 1),
    "arc_easy": (
        ("test",),
        {"question": "Which?", "choices": {"text": ["w", "x"], "label": ["A", "B"]},
         "answerKey": "B"},
        1,
    ),
    "hellaswag": (
        ("validation",),
        {"activity_label": "Run", "ctx_a": "He runs.", "ctx_b": "he", "ctx": "He runs. he",
         "endings": ["stops", "flies", "sings", "eats"], "label": "2"},
        2,
    ),
    "winogrande": (
        ("validation",),
        {"sentence": "The _ is big.", "option1": "cup", "option2": "box", "answer": "2"},
        1,
    ),
    "gsm8k": (("test", "train"), {"question": "2 + 2?", "answer": "It is 4.\n#### 4"}, "#### 4"),
    "longbench2_many_shot": (
        ("train",),
        {"context": "Text.", "question": "Which?", "choices": [*"wxyz"], "answer": 1},
        1,
    ),
    "longbench_trec": (
        ("test",),
        {"question": "Which?", "context": "Text.", "answers": ["red"],
         "all_classes": ["red", "blue"]},
        "red",
    ),
    "longproc_path_traversal_2k": (
        ("test",),
        {**PROC, "reference_output": "Oslo to Rome"},
        "<Route>Oslo to Rome</Route>",
    ),
    "longproc_tom_tracking_2k": (
        ("test",),
        {**PROC, "reference_output": "- Sally believes: box"},
        "- Sally believes: box",
    ),
    "longproc_html_to_tsv_2k": (
        ("test",),
        {**PROC, "reference_output": "name\tprice\nball\t3"},
        "```tsv\nname\tprice\nball\t3\n```",
    ),
    "graphwalks_128k": (
        ("train",),
        {"prompt": "A graph.", "answer_nodes": ["a", "b"]},
        "Final Answer: [a, b]",
    ),
    "infinitebench_passkey": (("passkey",), {**LONG_ROW, "answer": ["71432"]}, "71432"),
    "infinitebench_kv_retrieval": (("kv_retrieval",), {**LONG_ROW, "answer": ["ab-12"]}, "ab-12"),
    "minerva_math500": (
        ("test",),
        {"problem": "2 + 2?", "solution": "So $\\boxed{4}$.", "answer": "4"},
        "It is $\\boxed{4}$.",
    ),
    "aime24": (("train",), {"Problem": "2 + 2?", "Answer": 4}, "$\\boxed{4}$"),
    "aime25": (("test",), {"problem": "2 + 2?", "answer": "4"}, "$\\boxed{4}$"),
}  # fmt: skip


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    below = Path(lm_eval.tasks.__file__).parent
    return TaskManager(include_path=[str(below / n) for n in FOLDERS], include_defaults=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for task, (splits, record, _) in LAYOUTS.items():
        for split in splits:
            path = folder / task / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{json.dumps(record)}\n" * 6)
    return folder


@pytest.mark.parametrize("preset", PRESETS)
def test_lm_eval_has_all_tasks_of_a_preset(manager: TaskManager, preset: Any) -> None:
    names = PRESETS[preset]
    refuse_unscorable(manager, names)
    members = {name: leaf_configs(manager, name) for name in names}
    assert sum(map(len, members.values())) == {"short": 62, "long": 64, "reasoning": 3}[preset]
    covered = {task.rpartition("_")[0] for task in LAYOUTS} | {*LAYOUTS}
    for name, leaves in members.items():
        known = covered.intersection([name, *leaves])
        known = known or any(leaf.rpartition("_")[0] in covered for leaf in leaves)
        assert known or name == "longproc_travel_planning", f"no test has data in {name}'s layout"


@pytest.mark.parametrize("task", LAYOUTS)
def test_data_in_the_public_layout_is_read_and_scored(
    manager: TaskManager, data: Path, task: str
) -> None:
    """A right answer scores 1, a wrong one less."""
    if task == "minerva_math500":
        pytest.importorskip("math_verify")
    answer = LAYOUTS[task][2]
    section = HarnessEvaluation(tasks=[task], data_dir=str(data), hub=False)
    loaded = load_tasks(manager, task, section)
    assert loaded.missing == {}
    one = loaded.tasks[task]
    document = one.eval_docs[0]
    shots = one.config.num_fewshot or 0
    assert one.fewshot_context(document, shots)

    def score(right: bool) -> float:
        if isinstance(answer, int):
            count = len(one.doc_to_choice(document))
            chosen = answer if right else (answer + 1) % count
            results: Any = [(float(at == chosen), False) for at in range(count)]
        else:
            results = [answer if right else "no idea"]
        scores = one.process_results(document, results)
        metrics = mean_metrics(one)
        return next(value for name, value in scores.items() if name in metrics)

    assert score(True) == 1.0 > score(False)


def test_code_that_the_model_writes_is_not_executed(manager: TaskManager) -> None:
    """LongProc's countdown evaluates it, its pseudo_to_code compiles it."""
    for name in ("longproc", "longproc_countdown", "longproc_pseudo_to_code"):
        with pytest.raises(UserError, match="runs code that the model writes"):
            refuse_unscorable(manager, [name])
