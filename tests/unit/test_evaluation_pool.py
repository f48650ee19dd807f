"""Evaluations shared by several searches: computed once, with equal results, whatever is killed."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from bosch.heads import HeadMask
from bosch.journal import Journal
from bosch.objective.evaluation_log import Evaluation, EvaluationContext, EvaluationLog
from bosch.ranks import Ranks
from bosch.search.evaluator import Evaluator
from bosch.search.runs import find_mask, run_method
from bosch.search.settings import SearchSettings

CONTEXT = EvaluationContext("data", "model", 16, 0, "cpu")
COSTS = np.random.default_rng(0).exponential(size=(3, 4)) / 12


class Scorer:
    num_layers, num_key_value_heads = COSTS.shape
    quantum = 1e-9

    def __init__(self):
        self.calls = []

    def evaluate(self, mask, shared_layers=0, *, can_win=None):
        self.calls.append(mask.key)
        lost = float(COSTS[~mask.is_full].sum())
        return Evaluation(max(0.0, 1.0 - lost), -lost / 3, 0.25, 0.5)


def log_of(folder, name, context=CONTEXT):
    (folder / name).mkdir(exist_ok=True)
    path = folder / name / "evaluations.jsonl"
    return EvaluationLog.shared(path, context, Ranks(), folder / "pool")


def evaluation_in(log, mask):
    [record] = log.history(mask, "anchors")
    return record.evaluation


def search(log, method="bosch", ratio=0.5, stop_after=None):
    """(result, evaluator, masks evaluated); the result of a stopped search is None."""
    scorer = Scorer()
    evaluate = scorer.evaluate

    def dying(mask, shared_layers=0, can_win=None):
        if len(scorer.calls) == stop_after:
            raise InterruptedError
        return evaluate(mask, shared_layers)

    scorer.evaluate = dying
    evaluator = Evaluator(scorer, log)
    try:
        result = find_mask(method, evaluator, SearchSettings(ratio, budget_per_layer=5, seed=1))
    except InterruptedError:
        result = None
    return result, evaluator, scorer.calls


def test_no_mask_is_computed_twice_and_results_do_not_depend_on_sharing(tmp_path):
    paid: list[str] = []
    for number, (method, ratio) in enumerate(
        [("bosch", 0.5), ("b_single", 0.5), ("bosch", 0.75), ("rand", 0.5), ("bosch", 0.5)]
    ):
        result, evaluator, calls = search(log_of(tmp_path, str(number)), method, ratio)
        alone, alone_evaluator, _ = search(EvaluationLog(None, CONTEXT), method, ratio)
        assert result == alone
        assert evaluator.trace == alone_evaluator.trace
        costs, alone_costs = evaluator.costs(), alone_evaluator.costs()
        assert costs["evaluations"] == alone_costs["evaluations"]
        assert costs["evaluations"] - costs["reused_evaluations"] == len(calls)
        assert costs["model_seconds"] == pytest.approx(0.25 * len(calls))
        assert costs["full_forward_equivalents"] == pytest.approx(0.5 * len(calls))
        both = costs["full_forward_equivalents"] + costs["reused_full_forward_equivalents"]
        assert both == pytest.approx(alone_costs["full_forward_equivalents"])
        lines = [json.loads(line) for line in evaluator.log.path.open()]
        assert len(lines) == costs["evaluations"] == len({line["mask"] for line in lines})
        assert sum(line["reused"] for line in lines) == costs["reused_evaluations"]
        paid += calls
    assert len(paid) == len(set(paid))
    assert calls == []
    assert costs["reused_evaluations"] == costs["evaluations"] > 2


def test_a_resumed_search_keeps_its_costs(tmp_path):
    search(log_of(tmp_path, "other"), "b_single")
    whole, whole_evaluator, _ = search(EvaluationLog(None, CONTEXT))
    stopped, _, first = search(log_of(tmp_path, "mine"), stop_after=4)
    assert stopped is None
    result, evaluator, second = search(log_of(tmp_path, "mine"))
    assert result == whole
    assert evaluator.trace == whole_evaluator.trace
    assert not set(first) & set(second)
    costs = evaluator.costs()
    assert costs["evaluations"] - costs["reused_evaluations"] == len(first) + len(second)


def test_a_search_uses_evaluations_that_another_one_adds_meanwhile(tmp_path):
    mask = HeadMask.all_full(3, 4)
    one, other = log_of(tmp_path, "one"), log_of(tmp_path, "other")
    assert not other.history(mask, "anchors")
    one.append(mask, Evaluation(0.5, -1.25), "anchors")
    assert other.get(mask) is None
    [record] = other.history(mask, "anchors")
    assert record.evaluation == Evaluation(0.5, -1.25) and record.reused
    assert [record.reused for record in one.history(mask, "anchors")] == [False]


def test_a_search_uses_evaluations_that_another_one_adds_during_a_bound(tmp_path):
    mask, other = HeadMask.all_full(3, 4), log_of(tmp_path, "other")

    class Slower(Scorer):
        def evaluate(self, mask, shared_layers=0, *, can_win=None):
            whole = super().evaluate(mask)
            other.append(mask, whole, "anchors")
            return replace(whole, is_bound=can_win is not None)

    evaluator = Evaluator(Slower(), log_of(tmp_path, "mine"))
    assert evaluator.evaluate(mask, "swaps", "one", can_win=lambda *_: False).is_bound
    assert not evaluator.evaluate(mask, "swaps", "another").is_bound
    assert evaluator.scorer.calls == [mask.key]
    assert evaluator.costs()["reused_evaluations"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"calibration": "other"},
        {"model": "other"},
        {"window_size": 8},
        {"sinks": 1},
        {"numerics": "gpu"},
    ],
)
def test_searches_with_other_models_data_windows_or_kernels_share_nothing(tmp_path, change):
    mask = HeadMask.all_full(3, 4)
    log_of(tmp_path, "one").append(mask, Evaluation(0.5, -1.25), "anchors")
    assert not log_of(tmp_path, "other", replace(CONTEXT, **change)).history(mask, "anchors")
    assert log_of(tmp_path, "same").history(mask, "anchors")
    if "numerics" in change:  # a search that resumes on another device has its own
        again = log_of(tmp_path, "one", replace(CONTEXT, **change))
        assert again.get(mask) is not None
        assert not log_of(tmp_path, "new", replace(CONTEXT, **change)).history(mask, "anchors")


def test_an_evaluation_killed_between_the_two_files_is_completed(tmp_path):
    mask = HeadMask.all_full(3, 4)
    alone = tmp_path / "mine" / "evaluations.jsonl"
    alone.parent.mkdir()
    EvaluationLog(alone, CONTEXT).append(mask, Evaluation(0.5, -1.25), "anchors")
    for _ in range(2):
        log_of(tmp_path, "mine")
    [pool] = (tmp_path / "pool").iterdir()
    assert len(Journal(pool).read_new(dict)) == 1
    assert evaluation_in(log_of(tmp_path, "other"), mask) == Evaluation(0.5, -1.25)


@pytest.mark.parametrize(
    ("rank", "is_better"),
    [((0.5, -1.25), False), ((0.5, -1.0), True), ((0.25, -0.5), False), ((0.75, -2.0), True)],
)
def test_a_mask_is_beaten_by_score_then_by_log_likelihood(rank, is_better):
    assert Evaluation(0.5, -1.25).beaten_by(*rank) == is_better


def test_bounds_are_not_shared(tmp_path):
    mask = HeadMask.all_full(3, 4)
    bound = Evaluation(0.5, -1.25, is_bound=True, whole_pass_equivalents=0.75)
    log_of(tmp_path, "one").append(mask, bound, "anchors")
    assert not log_of(tmp_path, "two").history(mask, "anchors")
    again = log_of(tmp_path, "one")
    assert evaluation_in(again, mask) == bound and again.get(mask) is None


def test_a_line_without_its_fields_is_damaged_in_the_log_and_the_pool(tmp_path, caplog):
    mask = HeadMask.all_full(*COSTS.shape)
    log_of(tmp_path, "one").append(mask, Evaluation(1.0, -0.5), "anchors")
    [pool] = (tmp_path / "pool").iterdir()
    for path in (pool, tmp_path / "one" / "evaluations.jsonl"):
        [entry] = Journal(path).read_new(dict)
        for lost in ("mask", "score", "round_likelihoods"):
            Journal(path).append({name: entry[name] for name in entry if name != lost})
    log = log_of(tmp_path, "one")
    assert log.get(mask) == Evaluation(1.0, -0.5)
    assert [text.rpartition(": ")[2] for text in caplog.messages] == [
        "3 damaged lines are not used"
    ] * 2
    # The search publishes only whole lines.
    assert len((tmp_path / "one" / "evaluations.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_the_solvers_seconds_leave_out_the_evaluations(seconds):
    scorer = Scorer()
    evaluate = scorer.evaluate
    scorer.evaluate = lambda mask, shared_layers=0, can_win=None: replace(
        evaluate(mask), seconds=seconds
    )
    started = time.perf_counter()
    run = run_method("rand", scorer, SearchSettings(0.5, budget_per_layer=5))
    passed = time.perf_counter() - started
    assert 0 <= run.costs["solver_seconds"] <= passed
    assert (run.costs["solver_seconds"] > 0) == (seconds == 0)


def test_a_repeated_mask_is_in_the_trace_only_as_the_final_one():
    evaluator = Evaluator(Scorer(), EvaluationLog(None, CONTEXT))
    for phase in ("anchors", "layer_importance", "final"):
        evaluator.evaluate(HeadMask.all_full(3, 4), phase, phase)
    assert [point.phase for point in evaluator.trace] == ["anchors", "layer_importance"]
    costs = evaluator.costs()
    assert costs["naive_full_forward_equivalents"] == 2 and costs["evaluations"] == 1
    assert costs["full_forward_equivalents"] == 0.5
