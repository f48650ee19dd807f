"""From the lines of samples.jsonl to scores.json, and intervals: values worked out by hand.

studies/coverage.py simulates how often intervals hold the true value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from bosch.analysis.intervals import (
    compare,
    mean_score,
    share,
    student,
)
from stages.evaluate.scores import Scores
from stages.evaluate.tables import TaskGroup, against, position_table, score_tables, suite_table
from tests.report_fixture import cells

ACC = "acc,none"
OTHER = "the original answered other samples of it; run with --force original"


def lines(task: str, *scores: float, length: int = 0, **more: Any) -> list[dict[str, Any]]:
    """A model's records of a task; with a length of RULER, else of lm-eval."""
    suite = "ruler" if length else "lm_eval"
    return [
        {
            "suite": suite, "task": task, "length": length, "index": index, "score": score,
            "scores": {ACC: score}, "prompt": f"{task} {index}", **more,
        }
        for index, score in enumerate(scores)
    ]  # fmt: skip


def test_losses_are_compared_only_if_as_many_documents_were_read() -> None:
    table = position_table(2, [[1.0], [2.0]], [[0.5], [1.0]])
    assert [interval["mean"] for interval in table["difference"]] == [0.75]
    assert "difference" not in position_table(2, [[1.0], [2.0]], [[0.5]])


FOUR, THREE, HALF = [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]


def test_a_table_of_known_scores() -> None:
    table = suite_table(cells({("a", 512): FOUR, ("a", 1024): HALF, ("b", 512): THREE}))
    scores = {("a", "512"): 75.0, ("a", "1024"): 50.0, ("b", "512"): 50.0}
    counts = {("a", "512"): 4, ("a", "1024"): 4, ("b", "512"): 6}
    for place, score in scores.items():
        row = table[place[0]][place[1]]
        low, high = share(score / 100, counts[place])[1:]
        assert (row["score"], row["samples"]) == (score, counts[place])
        assert (row["low"], row["high"]) == pytest.approx((100 * low, 100 * high))
        assert "against_original" not in row and "cut" not in row
    assert table["average"] == pytest.approx(175 / 3)
    whole = mean_score([0.75, 0.5, 0.5], [4, 4, 6])
    assert (table["low"], table["high"]) == pytest.approx((100 * whole.low, 100 * whole.high))
    assert list(table["by_length"]) == ["512", "1024"]
    assert [mean["score"] for mean in table["by_length"].values()] == [62.5, 50.0]
    assert "groups" not in table and "score" not in table
    # In floats 100 * 0.29 is less than 29.
    assert suite_table(cells({("a", 0): [1.0] * 29 + [0.0] * 71}))["average"] == 29.0


def test_a_table_with_differences_from_the_original() -> None:
    original = cells({("a", 512): [1.0] * 4, ("b", 512): [1.0] * 3})
    table = suite_table(cells({("a", 512): FOUR, ("b", 512): THREE}), original)
    own = table["a"]["512"]["against_original"]
    assert own == against([(FOUR, [1.0] * 4)])
    assert (own["difference"], own["samples"]) == (-25.0, 4)
    wrong, right = [0.0] * 10, [1.0] * 10
    assert against([(wrong, right)])["p_value"] == compare([wrong], [right]).p_value < 0.05
    # The original has answered other questions of b, so b and the average are not compared.
    assert "against_original" not in table["b"]["512"] and "against_original" not in table
    whole = suite_table(
        cells({("a", 512): FOUR, ("a", 1024): HALF}), cells({("a", 512): HALF, ("a", 1024): FOUR})
    )
    assert whole["against_original"]["difference"] == 0.0
    assert whole["against_original"]["samples"] == 8
    assert whole["by_length"]["512"]["against_original"]["difference"] == 25.0


# Of three tasks: 2, 4 and 2 documents; c's second metric is no share, and d has no answers.
PARTS = cells({("a", 0): [1.0, 0.0], ("b", 0): [1.0, 1.0, 1.0, 0.0], ("c", 0): [0.5, 0.5]})
PARTS["c", 0] = [{**one, "scores": {"f1,none": 7.0, "f1,strict": 0.5}} for one in PARTS["c", 0]]
TASKS = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("metrics", "by_size", "score", "tasks"),
    [
        ((ACC,), True, 100 * 4 / 6, ["a", "b"]),
        ((ACC,), False, 62.5, ["a", "b"]),
        (("f1,none", "f1,strict"), False, 50.0, ["c"]),
    ],
)
def test_a_groups_score_follows_the_groups_rule(
    metrics: tuple[str, ...], by_size: bool, score: float, tasks: list[str]
) -> None:
    table = suite_table(PARTS, None, {"group": TaskGroup(TASKS, metrics, by_size, False)})
    row = table["groups"]["group"]
    assert (row["score"], row["tasks"], row["of"]) == (pytest.approx(score), tasks, 4)
    # A group that the recipe does not name does not change the average.
    assert table["average"] == suite_table(PARTS)["average"]


def test_a_named_group_counts_as_one_subtask() -> None:
    """If its score is a mean over documents it is one of two, next to c; else it counts apart."""
    for by_size, expected in ((True, (400 / 6 + 50) / 2), (False, 100 * 1.75 / 3)):
        groups = {"group": TaskGroup(("a", "b"), (ACC,), by_size, is_named=True)}
        table = suite_table(PARTS, None, groups)
        assert table["average"] == pytest.approx(expected)
        assert table["by_length"]["0"]["score"] == pytest.approx(expected)
        assert table["a"]["0"]["score"] == 50.0
    silent = {"group": TaskGroup(TASKS, ("absent,none",), True, is_named=True)}
    assert "groups" not in suite_table(PARTS, None, silent)


def test_a_group_is_compared_if_the_original_has_all_of_its_tasks() -> None:
    base, groups = cells({("a", 0): [1.0, 1.0]}), {"g": TaskGroup(("a", "b"), (ACC,), True, False)}
    whole = base | cells({("b", 0): [1.0] * 4})
    for original, difference in ((base, None), (whole, -100 * 2 / 6), ({}, None)):
        row = suite_table(PARTS, original, groups)["groups"]["g"]
        found = row.get("against_original", {}).get("difference")
        assert found == (None if difference is None else pytest.approx(difference))


def test_scores_of_models_and_reasons_for_missing_ones() -> None:
    """A task whose scores are no shares for one model has no scores for any model."""
    records = {
        "original": [*lines("a", 1.0, 1.0), *lines("odd", 7.0), *lines("n", 1.0, length=512)],
        "hybrid": [*lines("a", 1.0, 0.0), *lines("odd", 0.5), *lines("n", 0.0, length=512)],
    }
    tables = score_tables(records, {}, {"lm_eval": {"absent": "no file"}})
    original, hybrid = tables["checkpoints"].values()
    assert [*original] == [*hybrid] == ["lm_eval", "ruler"]
    assert original["lm_eval"]["average"] == 100.0 and "odd" not in original["lm_eval"]
    assert hybrid["lm_eval"]["a"]["0"]["against_original"]["difference"] == -50.0
    assert hybrid["ruler"]["n"]["512"]["score"] == 0.0
    assert "against_original" not in original["lm_eval"] and "positions" not in tables
    reason = "its score is not a share from 0 to 1 per document"
    assert tables["missing"] == {"lm_eval": {"absent": "no file", "odd": reason}}
    alone = score_tables({"hybrid": records["hybrid"]}, {}, {})
    assert "against_original" not in alone["checkpoints"]["hybrid"]["lm_eval"]
    assert "missing" not in alone


def test_models_are_compared_on_the_questions_that_the_original_answered_too() -> None:
    """Its stage ran earlier: the hub may have had fewer, more or other documents."""
    other = lines("other", 1.0, prompt="another question")
    original = [*lines("easy", 1.0, 1.0), *lines("gone", 1.0, 0.0), *other, *lines("more", 1.0)]
    hybrid = [*lines("easy", 1.0, 0.0), *lines("new", 0.0), *lines("other", 0.0)]
    records = {"original": original, "hybrid": [*hybrid, *lines("more", 0.0, 0.0)]}
    tables = score_tables(records, {}, {"lm_eval": {"gone": "no network"}})
    averages = {name: suites["lm_eval"]["average"] for name, suites in
                tables["checkpoints"].items()}  # fmt: skip
    assert averages == {"original": 100.0, "hybrid": 50.0}
    assert tables["checkpoints"]["hybrid"]["lm_eval"]["against_original"]["difference"] == -50.0
    assert tables["missing"]["lm_eval"] == {
        **dict.fromkeys(("new", "other", "more"), OTHER),
        "gone": "no network",
    }


def test_cut_prompts_are_counted_and_reported_once() -> None:
    records = [*lines("a", 1.0, 0.0), *lines("c", 1.0, cut=True), *lines("d", 0.0, cut=True)]
    tables = score_tables({"original": records, "hybrid": records}, {}, {})
    scores = Scores.model_validate(tables)
    assert scores.checkpoints["hybrid"]["lm_eval"].tasks["c"][0].cut == 1
    notes = scores.notes()
    assert len(notes) == 2
    for task, note in zip("cd", notes, strict=True):
        start = f"lm_eval: of {task} 1 of 1 samples are longer than the model reads"
        assert note.startswith(start)


def test_interval_of_a_share_equals_published_values() -> None:
    """8 of 10, as in Newcombe (1998), and none of 48."""
    assert share(0.8, 10) == pytest.approx((0.8, 0.4439, 0.9748), abs=1e-4)
    assert share(0.0, 48) == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 48)))
    assert mean_score([0.5], [20]) == share(0.5, 20)
    assert share(1.0, 48) == pytest.approx((1.0, 0.025 ** (1 / 48), 1.0))


@pytest.mark.parametrize("counts", [(99, 300), (100, 200), (100, 201), (500, 900)])
def test_large_subtasks_of_unequal_size_have_intervals_of_their_own(counts: tuple) -> None:
    one, other = share(0.5, counts[0]), share(0.8, counts[1])
    expected = share(0.65, 2 * counts[0])
    if counts == (100, 201):
        low = 0.65 - np.hypot(0.5 - one.low, 0.8 - other.low) / 2
        expected = (0.65, low, 0.65 + np.hypot(one.high - 0.5, other.high - 0.8) / 2)
    assert mean_score([0.5, 0.8], counts) == pytest.approx(expected)


def test_gains_and_losses_of_a_difference_are_not_independent() -> None:
    """MOVER for 10 gains and 5 losses in 50 samples, two cells of a multinomial."""
    result = compare([[1.0] * 10 + [0.0] * 40], [[0.0] * 10 + [1.0] * 5 + [0.0] * 35])
    up, down = share(0.2, 50), share(0.1, 50)
    p, q = 10.5 / 51.5, 5.5 / 51.5
    joint = 2 * np.sqrt(p * q / (1 - p) / (1 - q))
    for end, gain, loss in (
        (result.difference.low, 0.2 - up.low, down.high - 0.1),
        (result.difference.high, up.high - 0.2, 0.1 - down.low),
    ):
        reach = np.sqrt(gain**2 + loss**2 + joint * gain * loss)
        assert abs(end - 0.1) == pytest.approx(reach)


def test_four_documents_have_no_interval() -> None:
    """Of two kinds that are as frequent, four are of one in an eighth of the cases."""
    assert student([2.5]) == (2.5, None, None)
    assert student([2.0, 3.0, 2.0, 3.0]) == (2.5, None, None)
    assert student([2.0, 3.0, 4.0, 3.0, 3.0]).low is not None


def test_few_values_get_a_higher_confidence_level() -> None:
    levels = {5: 99.5, 29: 99.5, 30: 99, 59: 99, 60: 98, 199: 98, 200: 95}
    for count, level in levels.items():
        values = np.arange(float(count))
        expected = stats.t.interval(level / 100, count - 1, values.mean(), stats.sem(values))
        assert student(values)[1:] == pytest.approx(expected)


def test_models_with_equal_answers_still_have_an_interval() -> None:
    """The exact bound for no event in 4 x 12 samples: 7.4 points."""
    result = compare([[1.0] * 12] * 4, [[1.0] * 12] * 4)
    exact = 1 - 0.025 ** (1 / 48)
    assert result.p_value == 1.0
    assert result.difference == pytest.approx((0.0, -exact, exact), abs=2e-3)
    with pytest.raises(ValueError, match="different samples"):
        compare([[1.0]], [[1.0, 0.0]])
    for scores in ([], [[]], [[1.0], []], [[float("nan")]]):
        with pytest.raises(ValueError, match=r"no samples, or scores that are not finite"):
            compare(scores, scores)


def test_five_samples_detect_nothing() -> None:
    """Even if all of them are lost, p = 2 / 2^5 is above 5 %."""
    result = compare([[0.0] * 5], [[1.0] * 5])
    assert result.p_value > 0.05 and result.difference.high == 0
    result = compare([[0.0] * 6], [[1.0] * 6])
    assert result.p_value < 0.05 and result.difference.high < 0


def test_a_comparison_is_exact_if_few_samples_differ() -> None:
    """Of five subtasks of one sample each by signs alone; otherwise by random flips."""
    assert compare([[1.0]] * 5, [[0.0]] * 5).p_value == pytest.approx(2 / 2**5, abs=0.01)
    ones = np.ones((2, 30))
    assert compare(ones, 0 * ones).p_value == 1 / 4001
