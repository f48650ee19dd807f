"""What a search refuses, each in one sentence, before it has paid for more than the anchors."""

from __future__ import annotations

import pytest

from bosch.errors import RunError, UserError
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import (
    Evaluation,
    EvaluationContext,
    EvaluationLog,
    GateGradient,
)
from bosch.search.methods import METHODS
from bosch.search.runs import run_method
from bosch.search.settings import SearchSettings

CONTEXT = EvaluationContext("data", "model", 16, 0)


class Scorer:
    """2 layers of 4 units with one score for each of: all full, all sliding, anything between."""

    num_layers, num_key_value_heads, quantum = 2, 4, 0.5

    def __init__(self, full, sliding, between=0.5):
        self.full, self.sliding, self.between = full, sliding, between
        self.calls = 0

    def evaluate(self, mask, shared_layers=0, can_win=None):
        self.calls += 1
        kinds = {True: self.full, False: self.sliding}
        score = kinds[bool(mask.is_full[0, 0])] if mask.swa_ratio in (0, 1) else self.between
        return Evaluation(score, score - 1.0)

    def gate_gradient(self, mask, share=0, shares=1):
        raise AssertionError("no gradient before the anchors are checked")

    def gradient_passes(self, share=0, shares=1):
        return 0.5


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.searches])
@pytest.mark.parametrize(
    ("full", "sliding", "said"),
    [
        (0.0, 0.0, "answers none of the calibration examples"),
        (0.5, 0.5, "no lower than with full attention .* there is nothing to search for"),
        (0.5, 0.6, "no lower than with full attention .* there is nothing to search for"),
    ],
)
def test_a_set_that_tells_no_mask_from_another(method, full, sliding, said):
    scorer = Scorer(full, sliding)
    with pytest.raises(UserError, match=said):
        run_method(method, scorer, SearchSettings(0.5))
    assert scorer.calls == 2


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan")])
def test_a_ratio_that_no_mask_has(ratio):
    with pytest.raises(UserError, match=r"search\.swa_ratio is"):
        run_method("bosch", Scorer(1.0, 0.0), SearchSettings(0.5), swa_ratio=ratio)


@pytest.mark.parametrize("budget", [0, -3])
def test_a_budget_without_an_evaluation_for_each_group(budget):
    with pytest.raises(UserError, match=r"search\.budget_per_layer is .* at least one evaluation"):
        SearchSettings(0.5, budget_per_layer=budget)


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.searches])
def test_a_score_that_is_no_number(method):
    scorer = Scorer(1.0, 0.0, between=float("nan"))
    scorer.gate_gradient = lambda *args: GateGradient([[1.0] * 4] * 2)
    with pytest.raises(RunError, match="not finite"):
        run_method(method, scorer, SearchSettings(0.5, budget_per_layer=2))
    assert scorer.calls == 3


@pytest.mark.parametrize("other", ["model", "calibration"])
def test_a_log_of_another_model_or_data_set(other, tmp_path, caplog):
    path = tmp_path / "evaluations.jsonl"
    stranger = {"calibration": "data", "model": "model", other: "another"}
    log = EvaluationLog(path, EvaluationContext(**stranger, window_size=16, sinks=0))
    log.append(HeadMask.all_full(2, 4), Evaluation(1.0, -0.5), "anchors")
    ours = EvaluationLog(path, CONTEXT)
    assert len(ours) == 0
    (said,) = [record.message for record in caplog.records]
    assert "1 evaluations are of another model, calibration set or window: not used" in said


def test_a_method_that_does_not_exist():
    with pytest.raises(UserError, match="method 'bsoch' is unknown: choose one of bosch"):
        run_method("bsoch", Scorer(1.0, 0.0), SearchSettings(0.5))
