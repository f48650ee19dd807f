"""The evaluations of one search: in its log once, replayed after a kill, and their cost."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bosch.journal import Journal
from bosch.masks import HeadMask
from bosch.score.evaluation_log import Evaluation, EvaluationLog
from bosch.search.runs import find_mask, run_method
from bosch.search.settings import SearchSettings
from tests.search_case import CONTEXT, Additive, evaluator_of, random_costs

COSTS = random_costs(3, 4, 0)


def test_no_mask_is_evaluated_twice_whenever_a_search_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"

    def search(stop_after: int | None = None):
        scorer, path_of = Additive(COSTS), path if stop_after is not None else tmp_path / "whole"
        evaluate = scorer.evaluate

        def dying(mask: HeadMask) -> Evaluation:
            if len(scorer.calls) == stop_after:
                raise InterruptedError
            return evaluate(mask)

        scorer.evaluate = dying  # type: ignore[method-assign]
        evaluator = evaluator_of(scorer, path_of)
        settings = SearchSettings(0.5, budget_per_layer=5, seed=1)
        try:
            return find_mask("bosch", evaluator, settings), evaluator, scorer.calls
        except InterruptedError:
            return None, evaluator, scorer.calls

    whole, alone, calls = search()
    resumed, evaluator, asked = None, alone, list[str]()
    while resumed is None:
        resumed, evaluator, again = search(stop_after=4)
        asked += again
    assert resumed == whole and evaluator.trace == alone.trace
    assert asked == calls and len(set(asked)) == len(asked) > 8
    assert evaluator.costs() == pytest.approx(alone.costs())
    lines = [json.loads(line) for line in path.open()]
    assert [line["mask"] for line in lines] == asked
    assert evaluator.costs()["full_forward_equivalents"] == len(asked)


def test_a_line_without_its_fields_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mask, path = HeadMask.all_full(3, 4), tmp_path / "evaluations.jsonl"
    EvaluationLog(path, CONTEXT).append(mask, Evaluation(1.0, -0.5), "anchors")
    [entry] = Journal(path).read_new(dict)
    for lost in ("mask", "score"):
        Journal(path).append({name: entry[name] for name in entry if name != lost})
    assert EvaluationLog(path, CONTEXT).get(mask) == Evaluation(1.0, -0.5)
    assert [text.rpartition(": ")[2] for text in caplog.messages] == [
        "2 damaged lines are not used"
    ]
    assert len(path.read_text().splitlines()) == 1  # the search publishes only whole lines


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_the_solvers_seconds_leave_out_the_evaluations(seconds: float) -> None:
    scorer = Additive(COSTS)
    evaluate = scorer.evaluate
    scorer.evaluate = lambda mask: replace(evaluate(mask), seconds=seconds)  # type: ignore[method-assign]
    started = time.perf_counter()
    run = run_method("rand", scorer, SearchSettings(0.5, budget_per_layer=5))
    passed = time.perf_counter() - started
    assert 0 <= run.costs["solver_seconds"] <= passed
    assert (run.costs["solver_seconds"] > 0) == (seconds == 0)


def test_a_repeated_mask_is_in_the_trace_only_as_the_final_one() -> None:
    evaluator = evaluator_of(Additive(COSTS))
    for phase in ("anchors", "layer_importance", "final"):
        evaluator.evaluate(HeadMask.all_full(3, 4), phase, phase)
    assert [point.phase for point in evaluator.trace] == ["anchors", "layer_importance"]
    assert evaluator.costs()["evaluations"] == evaluator.costs()["full_forward_equivalents"] == 1
