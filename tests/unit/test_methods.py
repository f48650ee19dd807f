"""The table of methods: names, settings, bounds that no search exceeds, refusals, and the log."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch.budget import swa_budget
from bosch.errors import RunError, UserError
from bosch.journal import Journal
from bosch.masks import HeadMask
from bosch.score.evaluation_log import (
    Evaluation,
    EvaluationContext,
    EvaluationLog,
    GateGradient,
)
from bosch.search.bosch import SearchResult
from bosch.search.evaluator import Evaluator
from bosch.search.methods import METHODS, MethodName
from bosch.search.runs import find_mask, run_method
from bosch.search.settings import SearchSettings
from stages.search.stage import SearchConfig
from tests.hybrid_case import sliding_heads
from tests.search_case import (
    CONTEXT,
    Additive,
    evaluator_of,
    mask_of_key,
    random_costs,
)

# A front has masks of several budgets: tests/unit/test_front_search.py.
SELECTING = [
    name for name, method in METHODS.items() if method.kind != "file" and not method.finds_front
]
SEARCHED = [name for name in SELECTING if not METHODS[name].reads_attention]


class RandomScores:
    """Scores that depend only on the mask, in steps of `quantum`; a gradient costs `passes`."""

    quantum = 1 / 16

    def __init__(self, num_layers: int, num_heads: int, seed: int, passes: float = 0.0) -> None:
        self.num_layers, self.num_key_value_heads = num_layers, num_heads
        self.passes = passes
        costs = np.random.default_rng(seed).exponential(size=(num_layers, num_heads)) ** 2
        self.costs = costs / costs.sum()

    def evaluate(self, mask: HeadMask) -> Evaluation:
        lost = float(self.costs[~mask.is_full].sum())
        score, log_likelihood = round((1 - lost) / self.quantum) * self.quantum, -lost
        return Evaluation(score, log_likelihood)

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        return GateGradient(self.costs.tolist(), 0.0, self.passes)

    def gradient_passes(self, share: int = 0, shares: int = 1) -> float:
        return self.passes


def search_with(name: str, scorer: Any, options: SearchSettings) -> tuple[Evaluator, SearchResult]:
    evaluator = evaluator_of(scorer)
    return evaluator, find_mask(name, evaluator, options)


def _rising(values: list[float]) -> tuple[float, ...]:
    return tuple(sorted(values))


@st.composite
def any_settings(draw: st.DrawFn) -> SearchSettings:
    ratio = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.875, 1.0]), st.floats(0, 1))
    strict = draw(st.booleans())
    return SearchSettings(
        swa_ratio=draw(ratio),
        solver=draw(st.sampled_from(["nomad", "one_plus_one", *["nomad_penalty"] * strict])),
        budget_per_layer=draw(st.integers(1, 12)),
        alpha=draw(st.sampled_from([0.01, 100.0])),
        buckets=draw(st.lists(st.floats(0, 1), min_size=2, max_size=6, unique=True).map(_rising)),
        max_group_variables=draw(st.integers(1, 20)),
        strict=strict,
        seed=draw(st.integers(0, 20)),
    )


@pytest.mark.parametrize("name", SEARCHED)
@given(
    layers=st.integers(1, 9),
    units=st.integers(1, 5),
    granularity=st.integers(1, 4),
    options=any_settings(),
    costs=st.integers(0, 50),
    passes=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=20, deadline=None)
def test_every_mask_is_on_budget_and_no_search_exceeds_its_bound(
    name: str,
    layers: int,
    units: int,
    granularity: int,
    options: SearchSettings,
    costs: int,
    passes: float,
) -> None:
    """Also with units of several heads: no method splits a unit."""
    heads = units * granularity
    sliding = swa_budget(layers * units, options.swa_ratio) * granularity
    if granularity > 1:
        ratio = sliding / (layers * heads)
        options = replace(options, swa_ratio=ratio, head_granularity=granularity)
    evaluator, result = search_with(name, RandomScores(layers, heads, costs, passes), options)
    assert result.mask.num_sliding == sliding
    assert not any(count % granularity for count in result.mask.is_full.sum(1).tolist())
    assert result.evaluation == evaluator.log.get(result.mask)
    assert evaluator.best_on_budget is not None
    assert all(mask_of_key(p.mask).shape == (layers, heads) for p in evaluator.trace)
    most = METHODS[name].most_evaluations(options, layers, heads)
    assert evaluator.costs()["evaluations"] <= len(evaluator.trace) <= most
    if METHODS[name].searches:  # including a gradient that forms the units, if any
        assert len(evaluator.trace) + evaluator.passes_of_gradients <= most


@pytest.mark.parametrize(("name", "sliding"), [("bosch_plus", [[0, 2]]), ("bosch", [[2, 3]])])
def test_units_are_heads_of_similar_gradient_or_neighbours(
    name: str, sliding: list[list[int]]
) -> None:
    scorer = RandomScores(1, 4, 0)
    scorer.costs = np.array([[0.1, 0.45, 0.12, 0.33]])
    options = SearchSettings(0.5, head_granularity=2, budget_per_layer=100)
    _, result = search_with(name, scorer, options)
    assert sliding_heads(result.mask) == sliding


@pytest.mark.parametrize("name", SELECTING)
def test_a_granularity_without_a_mask_on_budget_is_refused(name: str) -> None:
    for ratio, granularity, sentence in (
        (0.3, 2, r"means 15 sliding heads of 48.*choose 0\.29 or 0\.33"),
        (0.5, 3, "8 KV heads per layer are no multiple of 3; choose a divisor of 8"),
    ):
        options = SearchSettings(ratio, head_granularity=granularity)
        with pytest.raises(UserError, match=sentence):
            search_with(name, RandomScores(6, 8, 1), options)


@pytest.mark.parametrize(
    ("name", "ratio", "budget", "expected"),
    [
        ("bosch", 0.75, 100, 2 + 28 * 28 + 2800),
        ("bosch", 0.5, 20, 2 + 28 * 20 + 560),
        ("bosch_plus", 0.5, 100, 2 + 280),
        ("b_single", 0.5, 100, 2 + 28 * 70),
        ("b_single", 0.45, 100, 2 + 28 * 70 + (28 * 4 - 101) * 4),
        ("b_multi", 0.75, 100, 2 + 7 * 400),
        ("b_layer", 0.5, 100, 2 + 2800),
        ("b_layer", 0.96, 100, 2 + 28),
        ("b_layer", 0.9, 100, 2 + 28 * 27 // 2 + 26 + (8 + 7 + 6 + 5 + 4 + 3)),
        ("front", 0.5, 100, 2 + 420),
        ("rand", 0.5, 100, 3),
        ("dcam", 0.5, 100, 3),
        ("bme", 0.5, 100, 3),
    ],
)
def test_bounds_of_each_method_worked_out_by_hand(
    name: str, ratio: float, budget: int, expected: int
) -> None:
    options = SearchSettings(ratio, budget_per_layer=budget)
    assert METHODS[name].most_evaluations(options, 28, 8) == expected


OTHER: dict[str, Any] = {
    "solver": "one_plus_one",
    "budget_per_layer": 9,
    "alpha": 0.01,
    "gamma": 3.0,
    "buckets": (0.0, 1.0),
    "max_group_variables": 4,
    "strict": True,
    "seed": 7,
    "mask": "head_mask.json",
    "head_granularity": 5,
}


@pytest.mark.parametrize("name", SEARCHED)
def test_a_setting_that_a_method_does_not_list_changes_nothing(name: str) -> None:
    options = SearchSettings(0.45, budget_per_layer=5)
    first, result = search_with(name, RandomScores(6, 5, 3), options)
    for setting in OTHER.keys() - METHODS[name].settings - {"head_granularity"}:
        other = replace(options, **{setting: OTHER[setting]})
        second, other_result = search_with(name, RandomScores(6, 5, 3), other)
        assert (result, first.trace) == (other_result, second.trace), setting


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bosch", METHODS["bosch"].settings - {"strict"}),
        ("b_multi", {"max_group_variables"}),
        ("rand", {"seed"}),
    ],
)
def test_settings_that_a_method_lists_change_its_search(name: str, settings: set[str]) -> None:
    options = SearchSettings(0.45, "nomad_penalty", budget_per_layer=5, alpha=1.0, strict=True)
    first, _ = search_with(name, RandomScores(12, 5, 3), options)
    for setting in settings:
        other = replace(options, **{setting: OTHER[setting]})
        second, _ = search_with(name, RandomScores(12, 5, 3), other)
        assert first.trace != second.trace, setting


@pytest.mark.parametrize("strict", [False, True])
def test_alpha_and_gamma_are_of_strict_searches_by_the_penalty_alone(strict: bool) -> None:
    """Candidates on budget have no penalty, and their order does not depend on the anchors."""
    first, _ = search_with(
        "bosch", RandomScores(12, 5, 3), SearchSettings(0.45, budget_per_layer=5, strict=strict)
    )
    other = SearchSettings(0.45, budget_per_layer=5, alpha=0.01, gamma=3.0, strict=strict)
    second, _ = search_with("bosch", RandomScores(12, 5, 3), other)
    assert first.trace == second.trace


def test_strict_changes_a_search_where_scores_tie() -> None:
    first, second = (
        search_with(
            "bosch", RandomScores(12, 5, 3), SearchSettings(0.45, budget_per_layer=5, strict=strict)
        )[0]
        for strict in (False, True)
    )
    assert first.trace != second.trace


def test_the_table_of_methods_agrees_with_names_and_settings() -> None:
    assert tuple(METHODS) == get_args(MethodName)
    names = {field.name for field in fields(SearchSettings)}
    for method in METHODS.values():
        assert callable(method.load())
        assert method.settings < names
    assert names <= {*SearchConfig.model_fields, "seed"}


def test_a_recipes_section_becomes_settings_field_by_field() -> None:
    assert set(OTHER) == {field.name for field in fields(SearchSettings)} - {"swa_ratio"}
    values = {"swa_ratio": 0.3, "method": "b_multi", **OTHER, "buckets": list(OTHER["buckets"])}
    section = SearchConfig.model_validate({k: v for k, v in values.items() if k != "seed"})
    assert section.settings(seed=7) == SearchSettings(swa_ratio=0.3, **OTHER)
    assert SearchConfig(swa_ratio=0.3).settings(seed=1) == SearchSettings(0.3, seed=1)


class Planted(RandomScores):
    """Every sliding unit costs its own loss and nothing else, so the best masks are known.

    Even layers are easy, odd ones ten times harder; no two units cost the same.
    """

    quantum = 1 / 64

    def __init__(self, seed: int) -> None:
        super().__init__(4, 3, seed, passes=1.0)
        rng = np.random.default_rng(seed)
        layers = np.array([1.0, 10.0, 1.2, 12.0])
        self.costs = layers[:, None] * rng.permuted(np.tile([0.5, 1.0, 2.0], (4, 1)), axis=1)
        self.costs *= rng.uniform(0.98, 1.02, self.costs.shape) / self.costs.sum()

    def cheapest(self, layers_at_once: int, sliding: Any) -> np.ndarray:
        """Full except for the `sliding` cheapest units of each group of layers."""
        groups = self.costs.reshape(4 // layers_at_once, -1)
        ranks = groups.argsort(axis=1).argsort(axis=1)
        return (ranks >= np.reshape(sliding, (-1, 1))).reshape(self.costs.shape)


# Groups of layers that share a budget in what a method can choose, their sliding units, the ratio.
_ANY_UNIT, _EASY_LAYERS = (4, 8, 2 / 3), (4, 6, 1 / 2)
PLANTED = {
    "bosch": (1, [3, 1, 2, 0], 1 / 2),  # with five buckets, each layer alone
    "bosch_plus": _ANY_UNIT, "b_single": (1, 2, 2 / 3),
    "b_multi": (2, 4, 2 / 3), "b_layer": _EASY_LAYERS,
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in SEARCHED if METHODS[n].kind != "layer rule"])
@pytest.mark.parametrize("seed", range(3))
def test_a_search_finds_the_planted_mask(name: str, seed: int) -> None:
    scorer = Planted(seed)
    layers_at_once, sliding, ratio = PLANTED[name]
    options = SearchSettings(ratio, budget_per_layer=200, max_group_variables=6, seed=seed)
    _, result = search_with(name, scorer, options)
    assert (result.mask.is_full == scorer.cheapest(layers_at_once, sliding)).all()


def test_gradients_are_over_shares_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, gate_gradient = [], Planted.gate_gradient

    def taking(self: Planted, mask: HeadMask, *share: int) -> GateGradient:
        taken.append(share)
        return gate_gradient(self, mask, *share)

    monkeypatch.setattr(Planted, "gate_gradient", taking)
    search_with("bosch_plus", Planted(0), SearchSettings(0.5, budget_per_layer=80))
    assert len(taken) > 8 and taken == [(n % 8, 8) for n in range(len(taken))]


class Fixed:
    """2 layers of 4 units with three scores: all full, all sliding, anything between."""

    num_layers, num_key_value_heads, quantum = 2, 4, 0.5

    def __init__(self, full: float, sliding: float, between: float = 0.5) -> None:
        self.full, self.sliding, self.between = full, sliding, between
        self.calls = 0

    def evaluate(self, mask: HeadMask) -> Evaluation:
        self.calls += 1
        score = {0: self.full, 8: self.sliding}.get(mask.num_sliding, self.between)
        return Evaluation(score, score - 1.0)

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        assert self.between != 0.5, "no gradient before the anchors are checked"
        return GateGradient([[1.0] * 4] * 2)

    def gradient_passes(self, share: int = 0, shares: int = 1) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("full", "sliding", "between", "said"),
    [
        (0.0, 0.0, 0.5, "answers none of the calibration examples"),
        (0.5, 0.5, 0.5, "no lower than with full attention .* there is nothing to search for"),
        (0.5, 0.6, 0.5, "no lower than with full attention .* there is nothing to search for"),
        (1.0, 0.0, float("nan"), "finite numbers"),
    ],
)
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.searches])
def test_a_search_is_refused_if_its_scores_cannot_rank_masks(
    name: str, full: float, sliding: float, between: float, said: str
) -> None:
    """After the anchors, or after the first score that is NaN."""
    scorer, is_finite = Fixed(full, sliding, between), between == 0.5
    with pytest.raises(UserError if is_finite else RunError, match=said):
        search_with(name, scorer, SearchSettings(0.5, budget_per_layer=2))
    assert scorer.calls == (2 if is_finite else 3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        *(({"swa_ratio": ratio}, "swa_ratio is") for ratio in (-0.1, 1.01, float("nan"))),
        *(({"budget_per_layer": n}, "budget_per_layer is .* at least one") for n in (0, -3)),
        ({"head_granularity": 0}, "head_granularity is 0"),
        ({"solver": "nomad_penalty"}, "solver: nomad_penalty minimises .* set search.strict: true"),
    ],
)
def test_settings_that_no_search_supports_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"search\.{said}"):
        SearchSettings(**{"swa_ratio": 0.5, **values})


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(UserError, match=r"method 'bsoch' is unknown: choose one of .*bosch"):
        run_method("bsoch", Fixed(1.0, 0.0), SearchSettings(0.5))


@pytest.mark.parametrize("other", ["model", "calibration"])
def test_a_log_of_another_model_or_calibration_set_is_not_used(
    other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, mask = tmp_path / "evaluations.jsonl", HeadMask.all_full(2, 4)
    other_context = {"calibration": "data", "model": "model", other: "another"}
    log = EvaluationLog(path, EvaluationContext(**other_context, windows=[16], sinks=0))
    log.append(mask, Evaluation(1.0, -0.5), "anchors")
    log.append_gradient(mask, "0/4", GateGradient([[1.0]]))
    log.append_held_out(mask, Evaluation(1.0, -0.5))
    ours = EvaluationLog(path, CONTEXT)
    assert len(ours) == 0 and ours.gradient(mask, "0/4") is ours.held_out(mask) is None
    (said,) = [record.message for record in caplog.records]
    assert "3 evaluations are of another model, calibration set or window: not used" in said


COSTS = random_costs(3, 4, 0)


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
