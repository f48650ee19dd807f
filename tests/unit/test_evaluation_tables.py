"""From stored answers to a suite's table: values worked out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lm_eval.config.group import AggMetricConfig as Rule

from bosch.analysis.intervals import compare, mean_score, share
from bosch.errors import RunError
from bosch.files import file_hashes
from stages.context import ModelConfig
from stages.evaluate.answers import AnswerFolder, EvaluatedModel, Subtask, TaskGroup
from stages.evaluate.models import write_tables
from stages.evaluate.scores import SAMPLES, Scores, read_samples
from stages.evaluate.suite import Suite
from stages.evaluate.suites.positions.suite import position_table
from stages.evaluate.tables import (
    SuiteAnswers,
    against,
    not_shares,
    suite_table,
)

ACC, NORM = "acc,none", "acc_norm,none"


def records(model: str, suite: str, task: str, length: int, *scores: Any) -> list[dict[str, Any]]:
    """Lines of samples.jsonl: numbers, or values of metrics whose first is the score."""
    head = {"checkpoint": model, "suite": suite, "task": task, "length": length}
    return [
        {**head, "score": next(iter(score.values())), "scores": score}
        if isinstance(score, dict)
        else {**head, "score": score}
        for score in scores
    ]


LINES = [
    *records("original", "harness", "a", 0, {ACC: 1.0, NORM: 0.0}, {ACC: 0.0, NORM: 1.0}),
    *records("hybrid", "harness", "a", 0, {ACC: 0.25}),
    *records("original", "needle", "a", 512, 1.0, 0.5),
    *records("original", "needle", "a", 1024, 0.0),
    *records("original", "harness", "b", 0, {NORM: 0.5}),
]


def test_lines_are_selected_by_model_and_suite() -> None:
    """Every other line has the same model, suite or task."""
    harness = SuiteAnswers.of(LINES, "original", "harness")
    assert harness.scores == {("a", 0): [1.0, 0.0], ("b", 0): [0.5]}
    assert harness.metrics == {
        ("a", 0): {ACC: [1.0, 0.0], NORM: [0.0, 1.0]}, ("b", 0): {NORM: [0.5]},
    }  # fmt: skip
    needle = SuiteAnswers.of(LINES, "original", "needle")
    assert needle.scores == {("a", 512): [1.0, 0.5], ("a", 1024): [0]}
    assert needle.metrics == {("a", 512): {}, ("a", 1024): {}}
    assert SuiteAnswers.of(LINES, "hybrid", "needle") == ({}, {}, [], {})
    assert SuiteAnswers.of(LINES, "hybrid", "harness").metrics == {("a", 0): {ACC: [0.25]}}


def test_the_last_checkpoint_is_the_one_with_the_most_tokens() -> None:
    names = ("tokens-10000", "tokens-2000", "hybrid", "original")
    assert Scores(checkpoints={name: {} for name in names}).last_trained == "tokens-10000"
    assert Scores(checkpoints={"hybrid": {}}).last_trained is None


def test_losses_are_compared_only_if_as_many_documents_were_read() -> None:
    table = position_table(2, [[1.0], [2.0]], [[0.5], [1.0]])
    assert [interval["mean"] for interval in table["difference"]] == [0.75]
    assert "difference" not in position_table(2, [[1.0], [2.0]], [[0.5]])


def test_tasks_whose_scores_are_no_shares_are_recognised() -> None:
    every = {("good", 0): [0.0, 1.0], ("high", 0): [0.5, 1.5], ("low", 4): [-0.1, 1.0]}
    assert not_shares(every).keys() == {"high", "low"}


FOUR, THREE, HALF = [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]


def test_a_table_of_known_scores() -> None:
    table = suite_table({("a", 512): FOUR, ("a", 1024): HALF, ("b", 512): THREE})
    # Standard errors: s^2 = 1/4 over 4 values, 1/3 over 4, 3/10 over 6.
    errors = [100 * math.sqrt(value) for value in (0.25 / 4, 1 / 12, 0.05)]
    scores = {("a", "512"): 75.0, ("a", "1024"): 50.0, ("b", "512"): 50.0}
    counts = {("a", "512"): 4, ("a", "1024"): 4, ("b", "512"): 6}
    for (place, score), error in zip(scores.items(), errors, strict=True):
        row = table[place[0]][place[1]]
        low, high = share(score / 100, counts[place])[1:]
        assert (row["score"], row["samples"]) == (score, counts[place])
        assert (row["low"], row["high"]) == pytest.approx((100 * low, 100 * high))
        assert row["standard_error"] == pytest.approx(error)
        assert "against_original" not in row
    assert table["average"] == pytest.approx(175 / 3)
    whole = mean_score([0.75, 0.5, 0.5], [4, 4, 6])
    assert (table["low"], table["high"]) == pytest.approx((100 * whole.low, 100 * whole.high))
    assert table["standard_error"] == pytest.approx(math.hypot(*errors) / 3)
    assert list(table["by_length"]) == ["512", "1024"]
    assert [mean["score"] for mean in table["by_length"].values()] == [62.5, 50.0]
    assert "groups" not in table and "score" not in table
    assert suite_table({("a", 0): [1.0]})["standard_error"] == 0.0
    # In floats 100 * 0.29 is less than 29.
    assert suite_table({("a", 0): [1.0] * 29 + [0.0] * 71})["average"] == 29.0


def test_a_table_with_differences_from_the_original() -> None:
    original = {("a", 512): [1.0] * 4, ("b", 512): [1.0] * 3}
    table = suite_table({("a", 512): FOUR, ("b", 512): THREE}, original)
    own = table["a"]["512"]["against_original"]
    assert own == against([(FOUR, [1.0] * 4)])
    assert (own["difference"], own["samples"]) == (-25.0, 4)
    wrong, right = [0.0] * 10, [1.0] * 10
    assert against([(wrong, right)])["p_value"] == compare([wrong], [right]).p_value < 0.05
    # The original has answered other questions of b, so b and the average are not compared.
    assert "against_original" not in table["b"]["512"] and "against_original" not in table
    whole = suite_table(
        {("a", 512): FOUR, ("a", 1024): HALF}, {("a", 512): HALF, ("a", 1024): FOUR}
    )
    assert whole["against_original"]["difference"] == 0.0
    assert whole["against_original"]["samples"] == 8
    assert whole["by_length"]["512"]["against_original"]["difference"] == 25.0
    assert "against_original" not in suite_table({("a", 512): FOUR}, {("b", 512): FOUR})


# Of three tasks: 2, 4 and 2 documents; c's second metric is no share, and d has no answers.
METRICS = {
    ("a", 0): {ACC: [1.0, 0.0], NORM: [1.0, 1.0]},
    ("b", 0): {ACC: [1.0, 1.0, 1.0, 0.0]},
    ("c", 0): {"f1,none": [0.5, 0.5], "f1,strict": [7.0, 8.0], "other,none": [1.0, 1.0]},
}
PARTS = {("a", 0): [1.0, 0.0], ("b", 0): [1.0, 1.0, 1.0, 0.0], ("c", 0): [0.5, 0.5]}
TASKS = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("rules", "score", "tasks", "metrics"),
    [
        ((Rule("acc"),), 100 * 4 / 6, ["a", "b"], {ACC: 100 * 4 / 6}),
        ((Rule("acc", weight_by_size=False),), 62.5, ["a", "b"], {ACC: 62.5}),
        ((Rule("acc_norm", ["x", "none"]),), 100.0, ["a"], {NORM: 100.0}),
        # Under all filters that any task has, without metrics that are no share.
        ((Rule("f1", weight_by_size=False),), 50.0, ["c"], {"f1,none": 50.0}),
        (
            (Rule("f1", ["strict"]), Rule("acc_norm", weight_by_size=False),
             Rule("acc")),
            100.0, ["a"], {NORM: 100.0, ACC: 100 * 4 / 6},
        ),
    ],
)  # fmt: skip
def test_a_groups_score_follows_the_groups_rule(
    rules: tuple[Rule, ...], score: float, tasks: list[str], metrics: dict[str, float]
) -> None:
    group = TaskGroup(TASKS, rules)
    table = suite_table(PARTS, None, {"group": group}, METRICS)
    row = table["groups"]["group"]
    assert (row["score"], row["tasks"], row["of"]) == (pytest.approx(score), tasks, 4)
    assert {name: metric["score"] for name, metric in row["metrics"].items()} == pytest.approx(
        metrics
    )
    # A group that the recipe does not name does not change the average.
    assert table["average"] == suite_table(PARTS)["average"]


def test_a_named_group_counts_as_one_subtask() -> None:
    """If its score is a mean over documents it is one of two, next to c; else it counts apart."""
    by_size, by_task = Rule("acc"), Rule("acc", weight_by_size=False)
    for rules, expected in (
        ((by_size,), (400 / 6 + 50) / 2),
        ((by_task, by_size), 100 * 1.75 / 3),
        ((Rule("acc_norm"), by_size), (100 + 50) / 2),
        ((Rule("absent"), by_size), (400 / 6 + 50) / 2),
    ):
        groups = {"group": TaskGroup(("a", "b"), rules, is_named=True)}
        table = suite_table(PARTS, None, groups, METRICS)
        assert table["average"] == pytest.approx(expected)
        assert table["by_length"]["0"]["score"] == pytest.approx(expected)
        assert table["a"]["0"]["score"] == 50.0


def test_groups_without_a_score_have_no_row() -> None:
    groups = {
        "none of its tasks": TaskGroup(("d",), (Rule("acc"),)),
        "no metric": TaskGroup(TASKS, (Rule("absent"),)),
        "no share": TaskGroup(("c",), (Rule("f1", ["strict"]),), is_named=True),
    }
    table = suite_table(PARTS, None, groups, METRICS)
    assert table["groups"] == {} and table["average"] == pytest.approx(100 * 1.75 / 3)


def test_a_group_is_compared_if_the_original_has_all_of_its_tasks() -> None:
    rule, base = Rule("acc"), {("a", 0): {ACC: [1.0, 1.0]}}
    whole = {**base, ("b", 0): {ACC: [1.0] * 4}}
    for original, difference in ((base, None), (whole, -100 * 2 / 6), ({}, None)):
        groups = {"group": TaskGroup(("a", "b"), (rule,))}
        table = suite_table(PARTS, PARTS, groups, METRICS, original)
        found = table["groups"]["group"].get("against_original", {}).get("difference")
        assert found == (None if difference is None else pytest.approx(difference))


@dataclass(kw_only=True)
class Answered(Suite):
    """A suite whose answers exist."""

    tasks: dict[str, int]
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def subtasks(self) -> list[Subtask]:
        return [Subtask(task, 0, self.digests.get(task, "")) for task in self.tasks]

    def samples(self, subtask: Subtask) -> int:
        return self.tasks[subtask.task]

    def prepare(self) -> None: ...

    def answer(self, *_: Any) -> Any: ...


def model(name: str) -> EvaluatedModel:
    return EvaluatedModel(name, ModelConfig(path=f"/models/{name}"))


def answered(folder: AnswerFolder, scores: dict[str, dict[str, list[float]]], **more: Any) -> Suite:
    """A suite with every model's answers to each task, in two journals and in no order."""
    for name, tasks in scores.items():
        for task, values in tasks.items():
            lines = [
                {"index": index, "score": value, "scores": {ACC: value}}
                for index, value in enumerate(values)
            ]
            for rank, own in enumerate((lines[1:][::-1], lines[:1])):
                writer = AnswerFolder(folder.folder, rank)
                subtask = Subtask(task, 0, more.get("digests", {}).get(task, ""))
                writer.journal(model(name), subtask).append(*own)
    counts = {task: len(values) for tasks in scores.values() for task, values in tasks.items()}
    common: Any = {"section": None, "tokenizer": None, "rank": 0, "world": 1, "batch_size": 1}
    return Answered(name="harness", answers=folder, tasks=counts, **common, **more)


def publish(tables: dict[str, Any], folder: Path) -> None:
    hashes = file_hashes(folder, [SAMPLES])
    Scores.model_validate({**tables, "sha256": hashes}).write(folder)


def test_lines_of_answers_are_sorted_by_index(tmp_path: Path) -> None:
    folder = AnswerFolder(tmp_path, 0)
    suite = answered(folder, {"original": {"a": [1.0, 0.0, 0.5], "read": [1.0]}})
    assert [
        (line["checkpoint"], line["suite"], line["task"], line["length"], line["index"],
         line["score"])
        for line in suite.records(model("original"))
    ] == [
        ("original", "harness", "a", 0, 0, 1.0),
        ("original", "harness", "a", 0, 1, 0.0),
        ("original", "harness", "a", 0, 2, 0.5),
        ("original", "harness", "read", 0, 0, 1.0),
    ]  # fmt: skip
    with pytest.raises(RunError, match=r"^hybrid: a at 0 lacks 3 of 3 answers"):
        list(suite.records(model("hybrid")))
    # An answer whose index is beyond the present samples counts for none of them.
    folder.journal(model("original"), Subtask("read", 0)).append({"index": 7, "score": 1.0})
    suite.tasks["read"] = 2
    with pytest.raises(RunError, match=r"^original: read at 0 lacks 1 of 2 answers"):
        list(suite.records(model("original")))


def test_scores_of_models_and_reasons_for_missing_ones(tmp_path: Path) -> None:
    """A task whose scores are no shares for one model has no scores for any model.

    Nor has a group without a metric. A model that is missing in one suite has scores in the others.
    """
    folder = AnswerFolder(tmp_path / "answers", 0)
    scores = {
        "original": {"a": [1.0, 1.0], "odd": [7.0], "read": [1.0, 0.0]},
        "hybrid": {"a": [1.0, 0.0], "odd": [0.5], "read": [1.0, 1.0]},
    }
    group, rule = ("a", "odd"), Rule("acc")
    suite = answered(
        folder, scores, missing={"absent": "no file"},
        groups={
            "both": TaskGroup(group, (rule,), is_named=True),
            "other": TaskGroup(group, (Rule("f1"),), is_named=True),
            "silent": TaskGroup(group, (Rule("f1"),)),
        },
    )  # fmt: skip
    empty = answered(folder, {name: {"odd": tasks["odd"]} for name, tasks in scores.items()})
    empty.name = "needle"
    models = [model(name) for name in scores]
    tables = write_tables(models, [suite, empty], tmp_path, None)
    lines = list(read_samples(tmp_path))
    assert [line["checkpoint"] for line in lines] == ["original"] * 6 + ["hybrid"] * 6
    original, hybrid = (tables["checkpoints"][name] for name in scores)
    assert original.keys() == hybrid.keys() == {"harness"}  # nothing of needle is a share
    assert hybrid["harness"]["a"]["0"]["against_original"]["difference"] == -50.0
    assert "against_original" not in original["harness"]
    assert hybrid["harness"]["groups"]["both"]["against_original"]["difference"] == -50.0
    assert hybrid["harness"]["read"]["0"]["samples"] == 2 and "odd" not in hybrid["harness"]
    assert tables["missing"] == {
        "harness": {
            "absent": "no file", "odd": "its score is not a share from 0 to 1 per document",
            "other": "none of its tasks has its metric as a share of 1",
        },
        "needle": {"odd": "its score is not a share from 0 to 1 per document"},
    }  # fmt: skip
    assert "positions" not in tables

    # The same, compared with scores of another folder, which come first.
    publish({**tables, "checkpoints": {"original": original}}, tmp_path)
    (tmp_path / "later").mkdir()
    fresh = answered(folder, {"hybrid": {"a": [1.0, 0.0], "read": [1.0, 1.0]}})
    again = write_tables([model("hybrid")], [fresh], tmp_path / "later", tmp_path)
    assert list(again["checkpoints"]) == ["original", "hybrid"] and "missing" not in again
    found = again["checkpoints"]["hybrid"]["harness"]
    assert found["a"] == hybrid["harness"]["a"] and "against_original" in found
    alone = write_tables([model("hybrid")], [fresh], tmp_path / "later", None)
    assert "against_original" not in alone["checkpoints"]["hybrid"]["harness"]
    # Only the original's score is no share.
    one_odd = answered(folder, {"hybrid": {"a": [1.0, 0.0], "odd": [0.5], "read": [1.0]}})
    odd = write_tables([model("hybrid")], [one_odd], tmp_path / "later", tmp_path)
    assert "odd" not in odd["checkpoints"]["hybrid"]["harness"]
    assert odd["missing"]["harness"].keys() == {"odd"}

    suite.failed["hybrid"] = "too long"
    half = write_tables(models, [suite], tmp_path, None)
    assert (
        half["checkpoints"]["hybrid"] == {} and half["missing"]["harness"]["hybrid"] == "too long"
    )
    assert half["checkpoints"]["original"] == original
    # A folder, and so a model, may have the name of a task.
    suite.failed = {"a": "too long"}
    named = write_tables([models[0], model("a")], [suite], tmp_path, None)["checkpoints"]
    assert named == {"original": original, "a": {}}
    # If the original has no score in the suite, there is no comparison.
    suite.missing, suite.failed = {}, {"original": "too long"}
    publish(write_tables(models[:1], [suite], tmp_path, None), tmp_path)
    fresh.missing, fresh.failed = {}, {}
    alone = write_tables([model("hybrid")], [fresh], tmp_path / "later", tmp_path)
    assert "against_original" not in alone["checkpoints"]["hybrid"]["harness"]
    assert alone["missing"] == {"harness": {"original": "too long"}}


def test_tasks_without_a_score_of_a_hybrid_are_left_out_of_the_originals_average(
    tmp_path: Path,
) -> None:
    """Also if the original's table is from an earlier stage."""
    folder = AnswerFolder(tmp_path / "answers", 0)
    first = answered(folder, {"original": {"a": [1.0, 1.0], "odd": [0.5]}})
    needle = answered(folder, {"original": {"odd": [0.5]}})
    needle.name = "needle"
    tables = write_tables([model("original")], [first, needle], tmp_path, None)
    assert tables["checkpoints"]["original"]["harness"]["average"] == 75.0
    publish(tables, tmp_path)
    (tmp_path / "later").mkdir()
    later = answered(folder, {"hybrid": {"a": [1.0, 0.0], "odd": [7.0]}})
    other = answered(folder, {"hybrid": {"odd": [7.0]}})
    other.name = "needle"
    both = write_tables([model("hybrid")], [later, other], tmp_path / "later", tmp_path)
    original, hybrid = both["checkpoints"].values()
    assert original.keys() == hybrid.keys() == {"harness"}
    assert "odd" not in original["harness"] and "odd" not in hybrid["harness"]
    assert (original["harness"]["average"], hybrid["harness"]["average"]) == (100.0, 50.0)
    assert hybrid["harness"]["against_original"]["difference"] == -50.0


def test_models_are_compared_on_the_questions_that_the_original_answered_too(
    tmp_path: Path,
) -> None:
    """Its stage ran earlier: the hub may have had fewer, more or other documents."""
    folder = AnswerFolder(tmp_path / "answers", 0)
    first = answered(
        folder,
        {"original": {"easy": [1.0, 1.0], "gone": [1.0, 0.0], "other": [1.0]}},
        missing={"hard": "no network"},
    )
    publish(write_tables([model("original")], [first], tmp_path, None), tmp_path)
    (tmp_path / "later").mkdir()
    own = {"easy": [1.0, 0.0], "hard": [0.0, 0.0], "new": [0.0], "other": [0.0]}
    later = answered(folder, {"hybrid": own}, digests={"other": "of other documents"})
    tables = write_tables([model("hybrid")], [later], tmp_path / "later", tmp_path)
    averages = {
        name: suites["harness"]["average"] for name, suites in tables["checkpoints"].items()
    }
    assert averages == {"original": 100.0, "hybrid": 50.0}
    assert tables["checkpoints"]["hybrid"]["harness"]["against_original"]["difference"] == -50.0
    again = "; run with --force original"
    assert tables["missing"]["harness"] == {
        "hard": f"the original has no score of it (no network){again}",
        "new": f"the original has no score of it{again}",
        "other": f"the original answered other samples of it{again}",
        "gone": f"the original alone has a score of it{again}",
    }


def test_cut_prompts_are_counted_and_reported_once(tmp_path: Path) -> None:
    folder = AnswerFolder(tmp_path / "answers", 0)
    names = ("original", "hybrid")
    suite = answered(folder, {name: {"a": [1.0, 0.0], "b": [1.0]} for name in names})
    for task, name in itertools.product("cd", names):
        folder.journal(model(name), Subtask(task, 0)).append(
            {"index": 0, "score": 1.0, "cut": True}
        )
    suite.tasks |= {"c": 1, "d": 1}
    publish(write_tables([model(name) for name in names], [suite], tmp_path, None), tmp_path)
    scores = Scores.read(tmp_path)
    assert scores.checkpoints["hybrid"]["harness"].tasks["c"][0].cut == 1
    notes = scores.notes()
    assert len(notes) == 2
    for task, note in zip("cd", notes, strict=True):
        start = f"harness: of {task} 1 of 1 samples are longer than the model reads"
        assert note.startswith(start)
    assert scores.notes("needle") == [] and scores.notes("harness") == notes


def test_answers_are_stored_by_the_models_identity_and_the_task(tmp_path: Path) -> None:
    """Names may be paths: two models' names may end alike, and a needle set names its tasks."""
    folder = AnswerFolder(tmp_path / "a", 0)
    places = [
        (EvaluatedModel(name, ModelConfig(path="m"), identity), Subtask(task, 1))
        for name, identity in (("../x", "1"), ("/x", None), ("x", None), ("x", "2"))
        for task in ("../../out", "/out", "one*", "onehop", "x" * 300, "", "a\nb")
    ]
    for number, place in enumerate(places):
        folder.journal(*place).append({"index": number, "score": 1.0})
    for number, place in enumerate(places):
        assert folder.read(*place).keys() == {number}
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_an_answer_without_its_fields_is_asked_again(tmp_path: Path) -> None:
    """Of two complete answers to a question the first one stays."""
    folder, place = AnswerFolder(tmp_path, 0), (model("original"), Subtask("task", 0))
    whole = [{"index": 0, "score": 1.0}, {"index": 1, "loss": [0.5]}]
    faulty = [{"score": 1.0}, {"index": 2}, {"index": "3", "score": 1}, {"index": 4, "loss": 1}]
    folder.journal(*place).append(*whole, *faulty, {"index": 0, "score": 0.0})
    assert folder.read(*place) == dict(enumerate(whole))
