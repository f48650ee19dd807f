"""The report's verdict and its sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.evaluate.scores import HYBRID, ORIGINAL, BinLoss, PositionLoss
from stages.report.decision import Decision, decide, overall, sentences
from stages.report.results import Results, collect_scores, load_results
from stages.report.stage import ReportConfig
from tests import report_fixture

FIRST, LAST = "tokens-1000", "tokens-2000"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(report_fixture.publish(tmp_path_factory.mktemp("stages")))


def with_answers(results: Results, right: Mapping[str, int], count: int) -> Results:
    """Models that answer the first `right` of `count` samples of a task."""
    samples = {
        name: {("needle", "vt", 512): [1.0] * n + [0.0] * (count - n)} for name, n in right.items()
    }
    return with_samples(results, samples)


def with_samples(results: Results, samples: Mapping[str, Any]) -> Results:
    tables = {"needle": next(iter(results.scores.checkpoints.values()))["needle"]}
    scores = results.scores.model_copy(
        update={"checkpoints": dict.fromkeys(samples, tables), "positions": {}}
    )
    return replace(results, samples=samples, scores=scores)


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
    assert (found.model, found.verdict) == (model, verdict)
    assert (found.needed is None) == (verdict != "not decided")
    folder = "materialize/model" if model == HYBRID else f"train/checkpoints/{model}"
    assert found.folder == folder


def test_the_margin_is_the_recipes(results: Results) -> None:
    made = with_answers(results, {ORIGINAL: 1000, HYBRID: 960}, 1000)
    verdicts = {margin: decided(made, margin).verdict for margin in (1.0, 4.0, 6.0)}
    assert verdicts == {1.0: "do not ship", 4.0: "not decided", 6.0: "ship"}
    sentence = sentences(made, ReportConfig(margin=6))[0]
    assert sentence.startswith("Ship the hybrid, untrained: −4.0 [")
    assert sentence.endswith("over 1 task (1,000 samples), within the margin of 6 points.")


def test_as_many_samples_as_stated_decide(results: Results) -> None:
    few = with_answers(results, {ORIGINAL: 48, HYBRID: 48}, 48)
    needed = decided(few).needed
    assert needed == pytest.approx(183, rel=0.02)  # 1 - 0.025^(1 / 183) = 2 %
    assert "would decide" in sentences(few, ReportConfig())[0]
    enough = with_answers(results, {ORIGINAL: needed, HYBRID: needed}, needed)
    assert decided(enough).verdict == "ship"
    on_the_margin = with_answers(results, {ORIGINAL: 50, HYBRID: 49}, 50)
    assert decided(on_the_margin).needed is None
    assert "no number of samples would decide" in sentences(on_the_margin, ReportConfig())[0]


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
        scores = made.scores.model_copy(update={"positions": positions})
        assert decided(replace(made, scores=scores)).model == model


def test_models_without_all_samples_and_an_original_without_answers(results: Results) -> None:
    """A last checkpoint that failed a suite does not remove the others."""
    made = with_answers(results, {ORIGINAL: 100, HYBRID: 50, FIRST: 99, LAST: 100}, 100)
    harness = {("harness", "mmlu", 0): [1.0] * 100}
    whole = {name: {**suites, **harness} for name, suites in made.samples.items() if name != LAST}
    found = decided(with_samples(made, {**whole, LAST: made.samples[LAST]}))
    assert (found.model, found.tasks) == (FIRST, 2)
    for right in ({ORIGINAL: 0, HYBRID: 5}, {ORIGINAL: 5}):
        none = with_answers(results, right, 20)
        assert decide(none, 2.0) is None
        assert sentences(none, ReportConfig())[0].startswith("Not decided: there are no scores")


def test_tasks_that_a_model_answered_in_part_are_not_compared(results: Results) -> None:
    one, other = ("needle", "vt", 512), ("needle", "vt", 1024)
    samples = {ORIGINAL: {one: [1.0] * 9, other: [1.0] * 9}, LAST: {one: [0.0] * 9, other: [1.0]}}
    outcome = overall(replace(results, samples=samples), LAST)
    assert outcome is not None
    assert (outcome[0], outcome[1].samples, outcome[1].difference) == (1, 9, -100.0)


def test_a_task_without_a_score_counts_for_nothing() -> None:
    place = {"suite": "needle", "length": 512}
    records = [
        {"checkpoint": HYBRID, **place, "task": task, "index": index, "score": index / 2}
        for task in ("vt", "odd")
        for index in range(3)
    ]
    table = {"needle": SimpleNamespace(tasks={"vt": {512: None}})}
    scores: Any = SimpleNamespace(checkpoints={HYBRID: table})
    assert collect_scores(records, scores) == {HYBRID: {("needle", "vt", 512): [0.0, 0.5, 1.0]}}


def test_the_sentences_state_caches_of_both_engines_speed_and_cost(
    results: Results, tmp_path: Path
) -> None:
    made = with_answers(results, {ORIGINAL: 20, LAST: 19}, 20)
    caches = results.caches(2048)
    assert caches.share == pytest.approx(0.297, abs=1e-3) and caches.vllm_share is not None
    said = sentences(made, ReportConfig(gpu_hour_price=2.0))
    assert said[-3:] == [
        "KV cache of 2k tokens against the original's: 29.7 % in transformers' generate (3.56 MiB "
        f"of 12 MiB), {100 * caches.vllm_share:.0f} % in vLLM on one GPU.",
        "Prefill runs at 1.50 and decoding at 2.50 times the original's speed at 2k.",
        "The run took 13.28 GPU hours (26.56 USD).",
    ]
    made = load_results(report_fixture.publish(tmp_path, without=("train", "measure")))
    assert "Speed was not measured (section measure)." in sentences(made, ReportConfig())
