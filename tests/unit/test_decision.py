"""The report's verdict and its sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bosch.analysis.intervals import holm
from stages.evaluate.scores import HYBRID, ORIGINAL, BinLoss, PositionLoss
from stages.report.decision import Decision, decide, overall, sentences
from stages.report.results import Model, Results, load_results, sample_scores
from tests import report_fixture

FIRST, LAST = "tokens-1000", "tokens-2000"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(report_fixture.publish(tmp_path_factory.mktemp("stages")))


def with_answers(results: Results, right: Mapping[Any, int], count: int) -> Results:
    """Models that answer the first `right` of `count` samples of a task."""
    samples = {
        name: {("ruler", "vt", 512): [1.0] * n + [0.0] * (count - n)} for name, n in right.items()
    }
    return with_samples(results, samples)


def with_samples(results: Results, samples: Mapping[Any, Any]) -> Results:
    """Scores of models' samples, by names or by pairs of branch and name."""
    table = {"ruler": results.main.scores.checkpoints[ORIGINAL]["ruler"]}
    by_branch: dict[str, dict[str, Any]] = {}
    for key, cells in samples.items():
        branch, name = key if isinstance(key, tuple) else ("", key)
        by_branch.setdefault(branch, {})[name] = {
            place: {str(index): score for index, score in enumerate(scores)}
            for place, scores in cells.items()
        }
    branches = {}
    for branch, cells in by_branch.items():
        old = results.branches[branch]
        content = {"checkpoints": dict.fromkeys(cells, table), "positions": {}}
        scores = old.scores.model_copy(update=content)
        branches[branch] = replace(old, samples=cells, scores=scores)
    return replace(results, branches=branches)


def decided(results: Results, margin: float = 2.0) -> Decision:
    decision = decide(results, margin)
    assert decision is not None
    return decision


@pytest.mark.parametrize(
    ("right", "count", "model", "verdict"),
    [
        ({HYBRID: 300, FIRST: 1000, LAST: 998}, 1000, FIRST, "ship"),
        ({HYBRID: 1000, FIRST: 1000}, 1000, HYBRID, "ship"),
        ({HYBRID: 1010}, 1000, HYBRID, "ship"),
        # Another model is no hybrid of this recipe.
        ({"rival": 1000, HYBRID: 300}, 1000, HYBRID, "do not ship"),
        # The whole interval is beyond the margin, of the best too.
        ({HYBRID: 300, FIRST: 800, LAST: 900}, 1000, LAST, "do not ship"),
        # Equal answers to too few samples, and a loss that may be within the margin or not.
        ({HYBRID: 24}, 24, HYBRID, "not decided"),
        ({HYBRID: 300, FIRST: 985}, 1000, FIRST, "not decided"),
        # 8.3 points with too few samples are no reason to ship.
        ({HYBRID: 22}, 24, HYBRID, "not decided"),
    ],
)
def test_the_interval_of_the_loss_decides(
    results: Results, right: dict[str, int], count: int, model: str, verdict: str
) -> None:
    made = with_answers(results, {ORIGINAL: count, **right}, max(count, *right.values()))
    found = decided(made)
    assert (found.model, found.verdict) == (Model(model), verdict)
    folder = "materialize/model" if model == HYBRID else f"train/checkpoints/{model}"
    assert found.folder == folder


def test_the_margin_is_the_recipes(results: Results) -> None:
    made = with_answers(results, {ORIGINAL: 1000, HYBRID: 960}, 1000)
    verdicts = {margin: decided(made, margin).verdict for margin in (1.0, 4.0, 6.0)}
    assert verdicts == {1.0: "do not ship", 4.0: "not decided", 6.0: "a small loss"}
    sentence = sentences(made, 6.0)[0]
    assert "margin of 6 points, the hybrid, untrained: −4.0 [" in sentence
    assert sentence.endswith("against the original over 1 task (1,000 samples).")


def test_the_loss_at_the_last_positions_decides_between_equals(results: Results) -> None:
    names = (HYBRID, FIRST, LAST)
    made = with_answers(results, dict.fromkeys((ORIGINAL, *names), 200), 200)
    for losses, model in (
        ((0.3, 0.2, 0.1), LAST),
        ((0.1, 0.2, 0.3), HYBRID),
        ((0.1, 0.1, 0.1), HYBRID),
    ):
        bins = {name: [BinLoss(mean=mean)] for name, mean in zip(names, losses, strict=True)}
        positions = {
            name: PositionLoss(edges=[1, 2], documents=6, loss=one, difference=one)
            for name, one in bins.items()
        }
        scores = made.main.scores.model_copy(update={"positions": positions})
        changed = replace(made, branches={"": replace(made.main, scores=scores)})
        assert decided(changed).model.name == model


def test_models_without_all_samples_and_an_original_without_answers(results: Results) -> None:
    """A last checkpoint that failed a suite does not remove the others."""
    made = with_answers(results, {ORIGINAL: 100, HYBRID: 50, FIRST: 99, LAST: 100}, 100)
    harness = {("lm_eval", "mmlu", 0): [1.0] * 100}
    own = {
        name: {place: [*scores.values()] for place, scores in cells.items()}
        for name, cells in made.main.samples.items()
    }
    whole = {name: {**suites, **harness} for name, suites in own.items() if name != LAST}
    found = decided(with_samples(made, {**whole, LAST: own[LAST]}))
    assert (found.model.name, found.tasks) == (FIRST, 2)
    for right in ({ORIGINAL: 0, HYBRID: 5}, {ORIGINAL: 5}):
        none = with_answers(results, right, 20)
        assert decide(none, 2.0) is None
        assert sentences(none, 2.0)[0].startswith("Not decided: there are no scores")


def test_tasks_that_a_model_answered_in_part_are_not_compared(results: Results) -> None:
    one, other = ("ruler", "vt", 512), ("ruler", "vt", 1024)
    samples = {ORIGINAL: {one: [1.0] * 9, other: [1.0] * 9}, LAST: {one: [0.0] * 9, other: [1.0]}}
    outcome = overall(with_samples(results, samples), Model(LAST))
    assert outcome is not None
    assert (outcome[0], outcome[1].samples, outcome[1].difference) == (1, 9, -100.0)


def test_samples_are_those_of_tasks_with_a_score_and_known_by_their_question() -> None:
    """A branch with another seed is compared with its own original alone."""
    table = {"ruler": SimpleNamespace(tasks={"vt": {512: None}})}
    scores: Any = SimpleNamespace(checkpoints={HYBRID: table})
    records = [
        {"checkpoint": HYBRID, "suite": "ruler", "length": 512, "task": task, "index": index,
         "score": index / 2, "question": question}
        for task in ("vt", "odd") for index in range(3) for question in ("Where?", "Who?")
    ]  # fmt: skip
    [(place, cells)] = sample_scores(records, scores)[HYBRID].items()
    assert place == ("ruler", "vt", 512) and [*cells.values()] == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]


def test_the_recipe_is_compared_with_branches_before_and_after_training(results: Results) -> None:
    """By Holm, a p-value of 0.03 among two is not significant."""
    right = {ORIGINAL: 200, HYBRID: 150, LAST: 196}
    right |= {("intr", ORIGINAL): 200, ("intr", HYBRID): 20, ("intr", LAST): 180}
    said = " ".join(sentences(with_answers(results, right, 200), 2.0))
    assert "Before training the recipe's hybrid scores +65.0 [" in said
    assert "against intr (significant). After 2,000 tokens of each the recipe's hybrid" in said
    folders = {**results.branches["intr"].folders, "materialize": Path("other")}
    other = replace(results.branches["intr"], folders=folders)
    made = replace(results, branches={**results.branches, "other": other})
    right |= {("other", ORIGINAL): 200, ("other", HYBRID): 149}
    said = " ".join(sentences(with_answers(made, right, 200), 2.0))
    assert "against intr (significant), +0.5 [" in said and "other (not significant). After" in said
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.7, 0.9]) == [1.0, 1.0] and holm([]) == []
