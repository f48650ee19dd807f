"""The checkpoint that the report says to ship, and its sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bosch.heads import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.window import Window
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.scores import (
    HYBRID,
    ORIGINAL,
    BinLoss,
    PositionLoss,
    rival_name,
)
from stages.measure import measurement
from stages.measure.process import measure_run
from stages.measure.run import run
from stages.measure.stage import Efficiency, MeasureConfig
from stages.report.decision import choose, comparisons, headline, overall
from stages.report.results import NeedleScores, Results, collect_scores, load_results
from stages.report.stage import ReportConfig
from tests import report_fixture
from tests.tiny_data import save_tiny_model

FIRST, LAST = "tokens-1000", "tokens-2000"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(report_fixture.publish(tmp_path_factory.mktemp("stages")))


def with_answers(results: Results, right: Mapping[str, int], count: int) -> Results:
    """Models that answer the first `right` of `count` samples of a task."""
    place = ("needle", "vt", 512)
    samples = {name: {place: [1.0] * n + [0.0] * (count - n)} for name, n in right.items()}
    return replace(results, samples=samples)


@pytest.mark.parametrize(
    ("right", "count", "shipped", "reason"),
    [
        # 1,000 samples show that the earlier one is within 5 points.
        ({HYBRID: 300, FIRST: 957, LAST: 960}, 1000, FIRST, "the earliest shown to be within"),
        # Forty samples are too few, although the two differ by only 2.5.
        ({HYBRID: 5, FIRST: 39, LAST: 40}, 40, LAST, "no earlier one is shown to be within 5"),
        ({HYBRID: 300, FIRST: 960, LAST: 900}, 1000, FIRST, "the highest score"),
        ({HYBRID: 1000, FIRST: 960, LAST: 900}, 1000, HYBRID, "the highest score"),
        ({HYBRID: 300}, 1000, HYBRID, "the only one with scores"),
    ],
)
def test_the_earliest_checkpoint_that_is_as_good_as_the_best_is_shipped(
    results: Results, right: dict[str, int], count: int, shipped: str, reason: str
) -> None:
    choice = choose(with_answers(results, {ORIGINAL: count, "intr": count, **right}, count))
    assert choice is not None and choice.model == shipped and reason in choice.reason


@pytest.mark.parametrize(
    ("right", "count", "losses", "room", "shipped", "reason"),
    [
        # If the scores do not decide, the loss does.
        ((20, 20, 20), 20, (0.3, 0.2, 0.1), 0.05, LAST, "3 have the highest score, it has the low"),
        ((20, 20, 20), 20, (0.1, 0.2, 0.3), 0.05, HYBRID, "3 have the highest score, it has the "),
        ((20, 20, 20), 20, None, 0.05, HYBRID, "3 have the highest score, it is the earliest"),
        # Within 5 points, but outside the interval of the best's loss, 0.05 wide on each side.
        ((955, 955, 960), 1000, (0.3, 0.14, 0.1), 0.05, FIRST, "the earliest shown to be within"),
        (
            (955, 955, 960),
            1000,
            (0.3, 0.2, 0.1),
            0.05,
            LAST,
            "before lose more at the last positions",
        ),
        # The best's loss has no interval with so few documents, so no loss is outside of it.
        ((955, 955, 960), 1000, (0.3, 0.2, 0.1), None, HYBRID, "the earliest shown to be within"),
    ],
)
def test_loss_by_position_decides_if_scores_do_not(
    results: Results, right: tuple[int, ...], count: int, losses: Any, room: float | None,
    shipped: str, reason: str,
) -> None:  # fmt: skip
    names = (HYBRID, FIRST, LAST)
    made = with_answers(results, {ORIGINAL: count, **dict(zip(names, right, strict=True))}, count)
    bins = [[BinLoss(mean=mean, high=room and mean + room)] for mean in losses or ()]
    positions = {
        name: PositionLoss(edges=[1, 2], documents=6, loss=one, difference=one)
        for name, one in zip(names, bins, strict=bool(losses))
    }
    scores = made.scores.model_copy(update={"positions": positions})
    choice = choose(replace(made, scores=scores))
    assert choice is not None and choice.model == shipped and reason in choice.reason
    sentence = headline(replace(made, scores=scores, efficiency=None), ReportConfig())
    assert sentence is not None and "has no measured speed (section measure)" in sentence
    if right[-1] == count:
        assert ": it scores as the original does, within [" in sentence


def test_a_checkpoint_with_fewer_samples_is_not_compared(results: Results) -> None:
    made = with_answers(results, {ORIGINAL: 100, FIRST: 100, LAST: 90}, 100)
    samples = {**made.samples, FIRST: {("needle", "vt", 512): [1.0]}}
    choice = choose(replace(made, samples=samples))
    assert choice is not None and choice.model == LAST
    assert choose(replace(made, samples={})) is None


def test_means_that_differ_only_by_rounding_are_equal(results: Results) -> None:
    """0.1 + 0.2 + 0.3 is more than 0.3 + 0.2 + 0.1 in floating point."""
    rising = {
        ("needle", task, 512): [score] for task, score in zip("abc", (0.1, 0.2, 0.3), strict=True)
    }
    falling = dict(zip(rising, [*rising.values()][::-1], strict=True))
    choice = choose(replace(results, samples={FIRST: falling, LAST: rising}))
    assert choice is not None and choice.best == FIRST
    assert choice.reason == "2 have the highest score, it is the earliest"
    # Each task has the same weight, whatever its number of samples.
    one, many = ("needle", "vt", 512), ("needle", "vt", 1024)
    samples = {
        FIRST: {one: [1.0], many: [0.0] * 9},
        LAST: {one: [0.0], many: [1.0] * 3 + [0.0] * 6},
    }
    choice = choose(replace(results, samples=samples))
    assert choice is not None and choice.best == FIRST


def test_tasks_that_a_model_answered_in_part_are_not_compared(results: Results) -> None:
    one, other = ("needle", "vt", 512), ("needle", "vt", 1024)
    samples = {ORIGINAL: {one: [1.0] * 9, other: [1.0] * 9}, LAST: {one: [0.0] * 9, other: [1.0]}}
    outcome = overall(replace(results, samples=samples), LAST)
    assert outcome is not None
    assert (outcome[0], outcome[1].samples, outcome[1].difference) == (1, 9, -100.0)


def test_a_last_checkpoint_that_failed_a_suite_does_not_remove_the_others(
    results: Results,
) -> None:
    made = with_answers(results, {ORIGINAL: 100, HYBRID: 50, FIRST: 100, LAST: 100}, 100)
    harness = {("harness", "mmlu", 0): [1.0] * 100}
    whole = {name: {**suites, **harness} for name, suites in made.samples.items() if name != LAST}
    choice = choose(replace(made, samples={**whole, LAST: made.samples[LAST]}))
    assert choice is not None and choice.model == FIRST
    alone = {ORIGINAL: whole[ORIGINAL], FIRST: whole[FIRST], LAST: made.samples[LAST]}
    choice = choose(replace(made, samples=alone))
    assert choice is not None and choice.reason == "the only one with scores in all tasks"


@pytest.mark.parametrize(
    ("right", "start"),
    [
        # The best loses 4.5 points; the one before it is within 5 points of the best and loses 7.
        (
            (930, 955),
            "Ship the hybrid after 2,000 tokens (the highest score; the hybrid after 1,000 tokens, "
            "shown to be within 5 points of it, loses more than that against the original): it",
        ),
        # The earlier one loses 5.5 points, which is not shown to be more than 5.
        (
            (945, 960),
            "Ship the hybrid after 1,000 tokens (the earliest shown to be within 5 points",
        ),
        (
            (800, 900),
            "Ship none yet: even the best loses more than 5 points. It is the hybrid after 2,",
        ),
        (
            (890, 900),
            "Ship none yet: even the best loses more than 5 points. It is the hybrid after 2,",
        ),
    ],
)
def test_nothing_is_to_ship_only_if_the_best_loses_too_much(
    results: Results, right: tuple[int, int], start: str
) -> None:
    made = with_answers(results, {ORIGINAL: 1000, FIRST: right[0], LAST: right[1]}, 1000)
    sentence = headline(made, ReportConfig())
    assert sentence is not None and sentence.startswith(start)


def test_depths_of_a_question_are_one_sample_also_in_the_sentence(results: Results) -> None:
    records = [
        {
            "checkpoint": name, "suite": "needle", "task": "vt", "length": 512,
            "index": 6 * q + depth, "document": str(q), "score": float(q < n),
        }
        for name, n in ((ORIGINAL, 60), (HYBRID, 57))
        for q in range(100)
        for depth in range(6)
    ]  # fmt: skip
    # A task without a score in scores.json counts for nothing.
    records += [{**record, "task": "odd", "score": 7.0} for record in records]
    table = {"needle": SimpleNamespace(tasks={"vt": {512: None}})}
    scores: Any = SimpleNamespace(checkpoints={ORIGINAL: table, HYBRID: table})
    samples = collect_scores(records, scores)
    found = overall(replace(results, samples=samples), HYBRID)
    assert found is not None and (found[0], found[1].samples) == (1, 100)
    assert found[1].p_value > 0.2


def test_a_rival_without_needle_scores_is_compared_too(results: Results) -> None:
    made = with_answers(results, {ORIGINAL: 100, HYBRID: 90, "intr": 70}, 100)
    place = ("harness", "mmlu", 0)
    samples = {
        name: {place: scores} for name, suites in made.samples.items() for scores in suites.values()
    }
    sentence = comparisons(replace(made, samples=samples, rivals=[]))
    assert sentence is not None and "against those of INTR before training" in sentence


def test_the_sentence_states_loss_detectable_loss_cache_speed_and_cost(results: Results) -> None:
    made = with_answers(results, {ORIGINAL: 20, HYBRID: 5, LAST: 19}, 20)
    sentence = headline(made, ReportConfig(gpu_hour_price=2.0))
    assert sentence is not None and sentence.startswith("Ship the hybrid after 2,000 tokens (")
    found = overall(made, LAST)
    assert found is not None and found[1].visible_loss is not None
    for words in (
        "it scores 5.0 points less than the original [",
        f"20 samples would show a loss of {found[1].visible_loss:.1f} points",
        "takes 29.7 % of the original's KV cache at 2k",
        "prefills at 1.50 and decodes at 2.50 times the original's speed at 2k "
        "(1.00 and 1.25 at 512), and ",
        "the run took 13.28 GPU hours (26.56 USD).",
    ):
        assert words in sentence, sentence
    assert headline(replace(made, samples={}), ReportConfig()) is None
    none = headline(with_answers(results, {ORIGINAL: 0, HYBRID: 0}, 20), ReportConfig())
    assert str(none).startswith(
        "No advice: the original scores 0 over its task, which does not show what a hybrid loses. "
        "The hybrid, untrained takes 29.7 % of the original's KV cache at 2k, prefills at 1.50"
    )
    near = headline(with_answers(results, {ORIGINAL: 1000, HYBRID: 996}, 1000), ReportConfig())
    assert "it scores 0.4 points less than the original [" in str(near)
    few = headline(with_answers(results, {ORIGINAL: 5, HYBRID: 4}, 5), ReportConfig())
    assert "5 samples are too few to show any loss" in str(few)


def test_the_cache_is_stated_at_the_longest_scored_length(
    tmp_path: Path,
) -> None:
    made = load_results(report_fixture.publish(tmp_path, without=("train", "measure")))
    sentence = str(headline(made, ReportConfig()))
    assert "takes 29.7 % of the original's KV cache at 2k, " in sentence
    sentence = str(headline(replace(made, needle=[]), ReportConfig()))
    assert "takes 1.5 KiB of KV cache per token instead of 6 KiB, " in sentence


@pytest.mark.parametrize(
    ("without_memory", "words"),
    [
        ({ORIGINAL}, "runs at 2k, where the original is out of memory, prefills at 1.00 and"),
        ({HYBRID}, "was not measured at 2k for want of memory, prefills at 1.00 and"),
        ({ORIGINAL, HYBRID}, "was not measured at 2k for want of memory, prefills at 1.00 and"),
    ],
)
def test_the_sentence_names_a_model_that_ran_out_of_memory(
    results: Results, without_memory: set[str], words: str
) -> None:
    assert results.efficiency is not None
    points = [
        point
        if point.length == 512
        else point.model_copy(
            update={"out_of_memory": point.model in without_memory, "over_original": None}
        )
        for point in results.efficiency.points
    ]
    efficiency = results.efficiency.model_copy(update={"points": points})
    made = with_answers(results, {ORIGINAL: 20, HYBRID: 19}, 20)
    assert words in str(headline(replace(made, efficiency=efficiency), ReportConfig()))


def test_the_search_is_compared_with_a_rival_before_and_after_training(results: Results) -> None:
    trained = rival_name("intr", LAST)
    right = {ORIGINAL: 200, HYBRID: 150, "intr": 20, LAST: 196, trained: 180}
    suite = results.rivals[0].suite
    rivals = [NeedleScores(name, suite) for name in ("intr", trained)]
    sentence = comparisons(replace(with_answers(results, right, 200), rivals=rivals))
    assert sentence is not None
    before, after = sentence.split(". ")
    assert before.startswith("The search's heads score +65.0 points [")
    assert before.endswith("] against those of INTR before training")
    assert "score +8.0 points [" in after and after.endswith("INTR after 2,000 tokens of both.")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "run_in_process", lambda request, what: measure_run(request))


@pytest.mark.usefixtures("in_this_process")
def test_the_stage_measure_compares_the_hybrid_with_its_original(tmp_path: Path) -> None:
    base = load_model(save_tiny_model(tmp_path / "base"))
    mask = HeadMask.from_swa_kv_heads([[0], [1]], 2)
    materialize(base, mask, Window(32)).save_pretrained(tmp_path / "materialize" / "model")
    config = StageConfig(
        section=MeasureConfig(lengths=[1024], decode_tokens=2, repeats=1),
        model=ModelConfig(path="unused", dtype="float32"),
        seed=0,
        runtime=Runtime(attention="sdpa"),
    )
    (tmp_path / "work").mkdir()
    summary = run(config, {"materialize": tmp_path / "materialize"}, tmp_path / "work")
    record = Efficiency.read(tmp_path / "work")
    assert record.settings["dtype"] == "float32" and record.settings["attention"] == "sdpa"
    assert record.machine
    assert [point.length for point in record.hybrids] == [1024]
    assert summary.keys() == {"1024"} and summary["1024"]["prefill_tokens_per_second"] > 0
    assert not list((tmp_path / "work").glob("*.partial.jsonl"))
