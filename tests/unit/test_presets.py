"""Presets: every benchmark on small data in its public layout, and missing benchmarks."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from bosch.errors import UserError
from data_prep.tasks.longbench import TASKS as LONGBENCH
from data_prep.tasks.tables import RulerTask
from pipeline.commands import validate
from pipeline.recipe.load import load_recipe
from stages.evaluate.presets import PRESETS, benchmarks
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.stage import gaps as gaps_of
from stages.evaluate.suites.harness import HarnessEvaluation
from stages.evaluate.suites.harness import tasks as harness_tasks
from stages.evaluate.suites.harness.tasks import (
    leaf_configs,
    load_tasks,
    mean_metrics,
    refuse_unscorable,
)

ROOT = Path(__file__).resolve().parents[2]
# The folders of lm-eval that contain the presets' tasks; its whole index takes seconds.
FOLDERS = (
    "mmlu", "arc", "hellaswag", "winogrande", "gsm8k", "longbench", "longbench2", "babilong",
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
    "babilong_qa1": (
        ("qa1",),
        {"input": "Mary went to the park.", "question": "Where is Mary?", "target": "park"},
        "The most recent location of Mary is park.",
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


def configured(**values: Any) -> EvaluateConfig:
    return EvaluateConfig(**values).completed("recipe")


@pytest.mark.parametrize("preset", PRESETS)
def test_lm_eval_has_all_tasks_of_a_preset(manager: TaskManager, preset: Any) -> None:
    config = configured(presets=[preset])
    names = config.harness.task_names
    refuse_unscorable(manager, names)
    members = {name: leaf_configs(manager, name) for name in names}
    assert sum(map(len, members.values())) == {"short": 62, "long": 69, "reasoning": 3}[preset]
    for one in (one for one in benchmarks([preset]) if one.documents):
        tasks = [task for name in one.tasks for task in config.harness.expanded(name)]
        assert one.parts == sum(len(members[task]) for task in tasks), one.name
    assert config.harness.required == []
    assert config.completed("recipe") == config
    covered = {task.rpartition("_")[0] for task in LAYOUTS} | {*LAYOUTS}
    for name, leaves in members.items():
        known = name.startswith("longbench_") or covered.intersection([name, *leaves])
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
    settings = {
        name: dict(benchmark.settings)
        for preset in PRESETS
        for benchmark in benchmarks([preset])
        for name in (*benchmark.tasks, "babilong_qa1")
        if benchmark.settings and task.split("_")[0] in name
    }
    section = HarnessEvaluation(
        tasks=[task], data_dir=str(data), hub=False, settings={task: settings.get(task, {})}
    )
    loaded = load_tasks(manager, task, section)
    assert loaded.missing == {}
    one = loaded.tasks[task]
    document = one.eval_docs[0]
    shots = one.config.num_fewshot or 0
    assert one.fewshot_context(document, shots)
    repeats = settings.get(task, {}).get("repeats", 1)
    assert one.config.repeats == repeats

    def score(right: bool) -> float:
        if isinstance(answer, int):
            count = len(one.doc_to_choice(document))
            chosen = answer if right else (answer + 1) % count
            results: Any = [(float(at == chosen), False) for at in range(count)]
        else:
            results = [answer if right else "no idea"]
            results = [results * repeats] if repeats > 1 else results
        scores = one.process_results(document, results)
        metrics = mean_metrics(one)
        return next(value for name, value in scores.items() if name in metrics)

    assert score(True) == 1.0 > score(False)


def test_the_score_of_sampled_answers_is_their_mean(manager: TaskManager, data: Path) -> None:
    """The second of four answers is right; lm-eval alone would score the first."""
    config = configured(presets=["reasoning"], harness={"data_dir": str(data), "hub": False})
    [task] = load_tasks(manager, "aime25", config.harness).tasks.values()
    assert task.config.generation_kwargs["do_sample"] is True
    assert task.config.generation_kwargs["until"]  # the task's own stay
    document = task.eval_docs[0]
    assert task.process_results(document, [["1", "$4$", "2", "3"]])["exact_match"] == 0.25
    task.build_all_requests(limit=1)
    [request] = task.instances
    request.resps = ["1", "$4$", "2", "3"]
    task.apply_filters()
    [(name, filtered)] = request.filtered_resps.items()
    assert (name, request.repeats, filtered) == ("none", 4, ["1", "$4$", "2", "3"])
    # A task's own filters apply first: the first number, the last number.
    section = HarnessEvaluation(
        tasks=["gsm8k"], data_dir=str(data), hub=False, settings={"gsm8k": {"repeats": 2}}
    )
    [task] = load_tasks(manager, "gsm8k", section).tasks.values()
    task.build_all_requests(limit=1)
    [request] = task.instances
    request.resps = ["#### 5", "#### 4"]
    task.apply_filters()
    assert request.filtered_resps["strict-match"] == ["5", "4"]
    filtered = request.filtered_resps["strict-match"]
    assert task.process_results(task.eval_docs[0], [filtered])["exact_match"] == 0.5


def test_code_that_the_model_writes_is_not_executed(manager: TaskManager) -> None:
    """LongProc's countdown evaluates it, its pseudo_to_code compiles it."""
    for name in ("longproc", "longproc_countdown", "longproc_pseudo_to_code"):
        with pytest.raises(UserError, match="runs code that the model writes"):
            refuse_unscorable(manager, [name])


def test_a_task_that_the_recipe_names_itself_must_be_available() -> None:
    config = configured(
        presets=["short", "long"],
        needle={"tasks": ["qa_1"]},
        harness={"tasks": ["gsm8k"]},
    )
    assert {*config.needle.tasks} == {*get_args(RulerTask)} == {*config.needle.optional, "qa_1"}
    assert config.harness.required == ["gsm8k"]
    assert {f"longbench_{task}" for task in LONGBENCH} < {*config.harness.task_names}


def test_settings_in_the_recipe_change_those_of_a_preset_key_by_key() -> None:
    """With a shorter limit for answers there are still four sampled answers."""
    own = {"aime24": {"generation_kwargs": {"max_gen_toks": 100}}, "gsm8k": {"repeats": 2}}
    settings = configured(presets=["reasoning"], harness={"settings": own}).harness.settings
    assert settings["gsm8k"] == {"repeats": 2}
    assert settings["aime24"] == {
        **settings["aime25"],
        "generation_kwargs": {**settings["aime25"]["generation_kwargs"], "max_gen_toks": 100},
    }


def loaded_with(config: EvaluateConfig, positions: int | None = None) -> Any:
    return SimpleNamespace(recipe={EvaluateConfig: config}, positions=positions)


def test_missing_benchmarks_are_reported_by_name(
    manager: TaskManager, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness_tasks, "task_manager", lambda names: manager)
    config = configured(presets=["short", "long"], harness={"data_dir": str(data), "hub": False})
    gaps = list(gaps_of(loaded_with(config)))
    assert "short: ARC: 1 of 2 tasks have no files" in gaps[1] and "(arc_challenge)" in gaps[1]
    assert "short: MMLU: 56 of 57 tasks" in gaps[0] and "and 53 more" in gaps[0]
    assert any("long: RULER: qa_2 needs a folder with hotpotqa.json" in gap for gap in gaps)
    assert not any("GSM8K" in gap or "GraphWalks" in gap for gap in gaps)
    tasks = ["gsm8k", "arc_challenge"]
    own = configured(harness={"tasks": tasks, "data_dir": str(data), "hub": False})
    [gap] = gaps_of(loaded_with(own))
    assert gap.startswith("evaluate.harness: 1 of 2 tasks have no files")
    assert "(arc_challenge)" in gap
    with_hub = configured(presets=["short"])
    assert list(gaps_of(loaded_with(with_hub))) == []


@pytest.mark.parametrize(("positions", "count"), [(32_768, 0), (30_720, 3), (None, 0)])
def test_benchmarks_whose_answers_leave_no_room_for_a_prompt_are_missing(
    positions: int | None, count: int
) -> None:
    """Qwen3's base models have 32,768 positions."""
    loaded = loaded_with(configured(presets=["reasoning"]), positions)
    gaps = [gap for gap in gaps_of(loaded) if "positions" in gap]
    assert len(gaps) == count
    assert all(gap.startswith("evaluate.presets: reasoning: ") for gap in gaps)
    # If the recipe names such a task itself, it is a fault.
    long = {"gsm8k": {"generation_kwargs": {"max_gen_toks": 512}}}
    section = HarnessEvaluation(tasks=["gsm8k"], settings=long)
    where = "evaluate.harness.settings.gsm8k.generation_kwargs.max_gen_toks with a prompt: "
    for most, faults in ((513, []), (512, [f"{where}513 is more than the model's 512 positions"])):
        assert list(section.faults(loaded_with(configured(), most), "evaluate.harness")) == faults


def test_validate_reports_missing_benchmarks_and_returns_1(
    manager: TaskManager, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness_tasks, "task_manager", lambda names: manager)
    overrides = ["evaluate.presets=[short]", "evaluate.needle=null"]
    options = Namespace(json=False)
    for hub, status in (("true", 0), ("false", 1)):
        recipe = load_recipe(
            ROOT / "recipes/quickstart.yaml", [*overrides, f"evaluate.harness.hub={hub}"]
        )
        assert validate.run(recipe, options) == status
        lines = capsys.readouterr().out.splitlines()
        gaps = [line for line in lines if line.startswith("a run continues without short: ")]
        assert len(gaps) == 5 * status
