"""B-single, B-multi and B-layer on synthetic scores: what they search, and to which budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch.budget import swa_budget
from bosch.search.ablations import b_layer, b_multi, b_single
from bosch.search.groups import layer_groups, split_evenly
from bosch.search.settings import SearchSettings
from tests.search_case import Additive, evaluator_of, random_costs


@given(
    layers=st.integers(1, 40),
    heads=st.integers(1, 16),
    ratio=st.one_of(st.sampled_from([0.25, 0.5, 0.75, 0.875]), st.floats(0, 1)),
    variables=st.integers(1, 60),
    method=st.sampled_from([b_multi, b_layer]),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_and_ratio_meets_the_budget(layers, heads, ratio, variables, method, seed):
    evaluator = evaluator_of(Additive(random_costs(layers, heads, seed)))
    options = SearchSettings(
        ratio, "one_plus_one", budget_per_layer=2, max_group_variables=variables, seed=seed
    )
    result = method(evaluator, options)
    assert (~result.mask.is_full).sum() == swa_budget(layers * heads, ratio)
    assert result.evaluation == evaluator.log.get(result.mask)


def test_b_multi_searches_groups_of_layers_jointly_top_first():
    costs = np.full((5, 3), 0.05)
    costs[4, 1] = costs[2, 0] = costs[2, 2] = costs[0, 1] = costs[1, 2] = 0.01
    evaluator = evaluator_of(Additive(costs))
    # 8 variables hold two layers of three heads: groups of 1, 2 and 2 layers from the top.
    result = b_multi(evaluator, SearchSettings(1 / 3, budget_per_layer=10, max_group_variables=8))
    assert result.mask.swa_kv_heads == [[1], [2], [0, 2], [], [1]]
    probes = [point for point in evaluator.trace if point.phase == "layer_importance"]
    assert [point.subproblem for point in probes] == ["layer 4"] * 3 + ["layers 2 to 3"] * 15 + [
        "layers 0 to 1"
    ] * 15
    assert not any("too many" in note for note in evaluator.notes)


def test_groups_are_neighbours_of_equal_size_or_nearly_so():
    assert layer_groups(28, 4) == [list(range(i, i + 4)) for i in range(0, 28, 4)]
    assert [len(group) for group in layer_groups(9, 4)] == [3, 3, 3]
    assert layer_groups(3, 1) == [[0], [1], [2]]


def test_b_multi_of_single_layers_is_b_single():
    options = SearchSettings(0.6, budget_per_layer=6, max_group_variables=4)
    results = [
        method(evaluator_of(Additive(random_costs(4, 4, 3))), options)
        for method in (b_multi, b_single)
    ]
    assert results[0].mask == results[1].mask
    assert results[0].layers == results[1].layers


def test_b_multi_spreads_what_a_group_cost_over_its_layers():
    costs = random_costs(4, 2, 7)
    evaluator = evaluator_of(Additive(costs))
    result = b_multi(evaluator, SearchSettings(0.5, budget_per_layer=9, max_group_variables=4))
    drops = [row["drop"] for row in result.layers]
    assert drops[0] == drops[1] and drops[2] == drops[3]
    assert sum(drops) == pytest.approx(1.0 - result.evaluation.score)


def test_b_layer_enumerates_the_layers_where_that_fits():
    costs = random_costs(6, 4, 2)
    scorer = Additive(costs)
    evaluator = evaluator_of(scorer)
    result = b_layer(evaluator, SearchSettings(0.5, budget_per_layer=4))
    cheapest = sorted(np.argsort(costs.sum(axis=1))[:3].tolist())
    assert [i for i, heads in enumerate(result.mask.swa_kv_heads) if heads] == cheapest
    assert result.mask.swa_ratio == 0.5
    assert len(scorer.calls) == 2 + 20  # the anchors and C(6, 3)


@pytest.mark.parametrize("solver", ["nomad", "one_plus_one"])
def test_b_layer_is_one_run_of_kappa_evaluations_per_layer(solver):
    scorer = Additive(random_costs(16, 2, 5))
    evaluator = evaluator_of(scorer)
    result = b_layer(evaluator, SearchSettings(0.5, solver, budget_per_layer=3))
    probes = [point for point in evaluator.trace if point.phase == "layer_importance"]
    assert 16 < len(probes) <= 48
    assert {point.subproblem for point in probes} == {"layers 0 to 15"}
    assert set(result.mask.full_kv_heads_per_layer) == {0, 2}
    assert result.evaluation.score == max(point.score for point in probes)


def test_b_layer_turns_a_surplus_back_in_the_one_layer_where_it_helps_most():
    costs = np.full((4, 4), 0.01)
    costs[2] = [0.02, 0.05, 0.03, 0.02]
    evaluator = evaluator_of(Additive(costs))
    # 14 of 16 units: four whole layers hold two units too many.
    result = b_layer(evaluator, SearchSettings(0.875, budget_per_layer=4))
    assert result.mask.swa_kv_heads == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]
    assert any("2 units too many" in note and "layer 2" in note for note in evaluator.notes)


@pytest.mark.parametrize(("strict", "word"), [(True, "arbitrarily"), (False, "log-likelihood")])
def test_ties_are_said(strict, word):
    def flat(mask):
        return 1.0 if mask.is_full.any() else 0.0

    evaluator = evaluator_of(Additive(random_costs(4, 2, 0), flat))
    options = SearchSettings(0.5, budget_per_layer=3, max_group_variables=4, strict=strict)
    b_layer(evaluator, options)
    assert any("every choice of 2 layers" in note and word in note for note in evaluator.notes)
    evaluator = evaluator_of(Additive(random_costs(4, 2, 0), flat))
    b_multi(evaluator, options)
    assert any("all groups of layers" in note for note in evaluator.notes)


@given(st.integers(0, 60), st.integers(1, 12))
def test_groups_are_as_equal_as_they_can_be(count, parts):
    expected = [part.tolist() for part in np.array_split(np.arange(count), parts)]
    assert split_evenly(range(count), parts) == expected
